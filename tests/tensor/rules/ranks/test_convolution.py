"""Convolution: uneven and empty parts, and what is not gathered."""

import pytest
import torch
import torch.nn.functional as F

from dure.tensor import Partial, Replicate, Shard
from tests.tensor.ranks.operators import check, placed

torch.manual_seed(0)
R, SUM = Replicate(), Partial("sum")


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_of_uneven_and_empty_parts(transposed):
    convolve = F.conv_transpose1d if transposed else F.conv1d
    shape = (3, 5, 3) if transposed else (5, 3, 3)
    check(convolve, random(3, 3, 7), random(*shape), random(5), partial=["sum"])
    check(convolve, random(3, 3, 7), random(*shape))


def test_convolutions_are_not_gathered():
    x, w, b = random(4, 4, 7), random(6, 4, 3), random(6)
    rows, channels = [Shard(0)], [Shard(1)]
    assert placed(F.conv1d, (x, rows), (w, [R]), (b, [R])) == [rows]
    assert placed(F.conv1d, (x, [R]), (w, rows), (b, rows)) == [channels]
    assert placed(F.conv1d, (x, channels), (w, channels), (b, [R])) == [[SUM]]
