"""Pointwise operators: which reductions go through them."""

from __future__ import annotations

import torch

from tests.tensor.ranks.operators import check
from tests.tensor.ranks.parts import REDUCTIONS

X = torch.arange(1.0, 13, dtype=torch.float64).reshape(3, 4).requires_grad_()


def test_only_linear_operators_let_partial_through():
    def linear(x):
        return -x, x.clone(), x * -2, x / 4, x.masked_fill(x.detach() > 5, 0), x.to(torch.float32)

    check(linear, X, partial=REDUCTIONS, meshes=[(2,)])
    check(lambda x: (x.exp(), x.masked_fill(x.detach() > 5, 1)), X, partial=["sum", "max"])


def test_sums_and_products_of_two():
    def both(x, y):
        return x + y, x - y, x * y, x / (y + 1), torch.add(x, y, alpha=2)

    check(both, X, X.detach().cos().requires_grad_(), partial=["sum", "avg", "max"])
