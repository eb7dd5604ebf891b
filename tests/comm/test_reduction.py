"""`reduce_in_order` against plain Python."""

from __future__ import annotations

import pytest
import torch

from dure.comm.ops import ReduceOp, reducible_dtypes
from dure.comm.reduction import reduce_in_order
from tests.comm.conformance.values import contribution, reduced, same

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def _dtypes(name: str) -> list[torch.dtype]:
    return sorted(reducible_dtypes(getattr(ReduceOp, name)), key=str)


@pytest.mark.parametrize("name", OPS)
def test_reduce_in_order_equals_plain_python(name):
    for dtype in _dtypes(name):
        for n in (1, 2, 5):
            tensors = [contribution(r, 24, dtype, name) for r in range(n)]
            out = torch.empty_like(tensors[0])
            reduce_in_order(tensors, getattr(ReduceOp, name), out)
            assert same(out, reduced(n, 24, dtype, name)), (dtype, n)


def test_out_may_be_one_of_the_inputs():
    tensors = [torch.arange(4.0) + r for r in range(3)]
    reduce_in_order(tensors, ReduceOp.SUM, tensors[1])
    assert tensors[1].tolist() == [3.0, 6.0, 9.0, 12.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nan_wins_min_and_max(dtype):
    a = torch.tensor([float("nan"), 1.0, -2.0], dtype=dtype)
    b = torch.tensor([5.0, float("nan"), 3.0], dtype=dtype)
    for name, last in (("MIN", -2.0), ("MAX", 3.0)):
        out = torch.empty_like(a)
        reduce_in_order([a, b], getattr(ReduceOp, name), out)
        assert out.isnan().tolist() == [True, True, False]
        assert out[2] == last


def test_sixteen_bit_floats_are_rounded_once():
    """1 + 2^-9 + 2^-9 is 1 + 2^-8 in float32, but 1 where bfloat16 rounds each step."""
    tiny = torch.tensor([2.0**-9], dtype=torch.bfloat16)
    tensors = [torch.ones(1, dtype=torch.bfloat16), tiny, tiny, tiny, tiny]
    out = torch.empty(1, dtype=torch.bfloat16)
    reduce_in_order(tensors, ReduceOp.SUM, out)
    assert out.item() == 1 + 2.0**-7
