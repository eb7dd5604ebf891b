"""Rules of convolution, pooling and resampling: what torch's samples leave out."""

from __future__ import annotations

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


def test_grouped_convolutions():
    def convolve(x, w, b):
        return F.conv2d(x, w, b, groups=2, padding=1)

    check(convolve, random(3, 4, 5, 5), random(6, 2, 3, 3), random(6))


def test_convolutions_are_not_gathered():
    x, w, b = random(4, 4, 7), random(6, 4, 3), random(6)
    rows, channels = [Shard(0)], [Shard(1)]
    assert placed(F.conv1d, (x, rows), (w, [R]), (b, [R])) == [rows]
    assert placed(F.conv1d, (x, [R]), (w, rows), (b, rows)) == [channels]
    assert placed(F.conv1d, (x, channels), (w, channels), (b, [R])) == [[SUM]]


def test_pooling_and_resampling():
    def pools(x):
        return (
            F.max_pool2d(x, 2),
            F.avg_pool2d(x, 2),
            F.adaptive_avg_pool2d(x, (3, 2)),
            F.adaptive_max_pool2d(x, (3, 2)),
            F.interpolate(x, scale_factor=2.0),
            F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        )

    check(pools, random(3, 2, 4, 6), partial=["sum"])
    check(lambda x: F.max_pool2d(x, 2), random(3, 4, 6))
    assert placed(pools, (random(3, 2, 4, 6), [Shard(1)])) == [[Shard(1)]] * 6
