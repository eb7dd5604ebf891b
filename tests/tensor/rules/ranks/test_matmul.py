"""Matrix products and linear layers: what they are, and that nothing is gathered."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

import pytest
import torch
import torch.nn.functional as F

from dure.tensor import Partial, Replicate, Shard
from dure.tensor.debug import CommDebugMode
from tests.tensor.ranks.operators import check, placed
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_mesh

torch.manual_seed(0)


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_a_row_wise_layer_moves_no_weight():
    x, weight, bias = random(5, 6), random(3, 6), random(3)
    check(F.linear, x, weight, bias)
    columns = [Shard(1)]
    assert placed(F.linear, (x, columns), (weight, columns), (bias, [Replicate()])) == [[Partial()]]


@pytest.mark.parametrize("cuts", [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(1), Shard(1))])
@on_mesh(2, 2)
def test_a_linear_of_rows_cut_twice_sends_nothing(mesh, cuts):
    """Rows are flattened to a strided shard, which goes through products, and unflattened again."""

    x = made(mesh, torch.ones(4, 8, 3).requires_grad_(), cuts)
    weight = made(mesh, torch.ones(5, 3).requires_grad_(), [Replicate(), Replicate()])
    with CommDebugMode() as mode:
        y = F.gelu(F.linear(x, weight, weight.sum(1)))
        (y * y).sum().backward()
    assert mode.get_total_counts() == 0
    assert y.placements == x.grad.placements == cuts
