"""Reshapes of sharded tensors: which shards go along, in every order."""

from __future__ import annotations

import pytest
import torch

from dure.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dure.testing import CommRecorder, run_ranks
from tests.tensor.ranks.operators import Sample, failures, ways


def reshaped(*shapes):
    def run(x):
        for shape in shapes:
            x = x.reshape(shape)
        return x * 2

    return run


def linear(x, weight):
    """As torch computes it: rows flattened, a product, rows unflattened."""
    return (x.flatten(0, 1) @ weight).unflatten(0, x.shape[:2])


def heads(x):
    split = x.view(*x.shape[:2], 4, -1).transpose(1, 2)
    return split.reshape(x.shape[0] * 4, x.shape[1], -1) * 2


RESHAPES = [
    ((4, 6), [(24,), (8, 3)]),
    ((24,), [(4, 6), (24,)]),
    ((24,), [(2, 2, 6), (4, 6)]),
    ((2, 4, 6), [(48,), (8, 6)]),
    ((4, 4, 3), [(16, 3), (2, 8, 3)]),
    ((8, 8), [(64,), (4, 16)]),
    ((3, 5), [(15,), (5, 3)]),
    ((0, 4), [(4, 0)]),
    ((1, 4), [(4,), (1, 4, 1)]),
    ((12,), [(6, 2), (3, 2, 2), (12,)]),
    ((2, 6, 2), [(12, 2), (24,)]),
    ((36,), [(6, 6), (36,), (4, 9)]),
]


def test_a_view_beside_a_sharded_dimension_of_size_1_sends_nothing():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(6.0).reshape(1, 2, 3), mesh, [Shard(0)])
        with CommRecorder() as seen:
            made = [x.view(1, 6), x.view(1, 1, 6), x.reshape(1, 3, 2)]
        assert seen.ops == []
        assert [y.placements for y in made] == [(Shard(0),)] * 3
        assert [y.to_local().shape for y in made] == [(1 - rank, *y.shape[1:]) for y in made]
        assert all(y.full_tensor().flatten().tolist() == [0, 1, 2, 3, 4, 5] for y in made)
        assert x.view(6).placements == (Replicate(),)  # torch refuses

    run_ranks(2, body)


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 3), (2, 1, 2)], ids=str)
def test_reshapes_of_reshapes(sizes):
    """Cuts of several axes through dimensions that are flattened and split, in every order."""
    samples = [
        Sample(f"{shape} {to}", reshaped(*to), (torch.randn(shape, requires_grad=True),))
        for shape, to in RESHAPES
    ]
    for shape in [(4, 4, 6), (3, 4, 2), (2, 8, 3)]:
        x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[2], 4)
        samples.append(Sample(f"linear {shape}", linear, (x, weight)))
    for shape in [(2, 4, 8), (4, 3, 8)]:
        samples.append(Sample(f"heads {shape}", heads, (torch.randn(shape),)))
    tries = [(s.compute(), way) for s in samples for way in ways(s, sizes, 10)]
    assert failures(tries, sizes) == []
