"""Placements are values as torch's are, and cut a dimension as torch's do."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed.tensor.placement_types as theirs

import dure.tensor.placement_types as ours


@pytest.mark.parametrize(
    "make",
    [
        lambda p: p.Shard(0),
        lambda p: p.Shard(-1),
        lambda p: p.Shard(dim=2),
        lambda p: p.Replicate(),
        lambda p: p.Partial(),
        lambda p: p.Partial("avg"),
        lambda p: p.Partial(reduce_op="product"),
        lambda p: p._StridedShard(1, split_factor=3),
    ],
)
def test_placements_are_values_as_torchs(make):
    own, other = make(ours), make(theirs)
    assert (str(own), repr(own)) == (str(other), repr(other))
    for package, placement in ((ours, own), (theirs, other)):
        assert placement == make(package)
        assert hash(placement) == hash(make(package))
        assert placement != package.Shard(7)
        assert isinstance(placement, package.Placement)
        assert copy.deepcopy(placement) == placement
        assert pickle.loads(pickle.dumps(placement)) == placement
    for asked in ("is_shard", "is_replicate", "is_partial"):
        if asked == "is_shard" and "Strided" in repr(own):
            continue  # torch says no of shards that are strided
        assert getattr(own, asked)() == getattr(other, asked)(), asked
    for dim in (0, 1, -1):
        assert own.is_shard(dim) == (getattr(other, "dim", None) == dim)
    for op in ("sum", "avg"):
        assert own.is_partial(op) == other.is_partial(op)
    for name in ("dim", "reduce_op", "split_factor"):
        assert getattr(own, name, None) == getattr(other, name, None)


def test_parts_of_a_dimension_are_cut_as_torch_cuts_them():
    for size, parts in itertools.product(range(8), range(1, 5)):
        for rank in range(parts):
            own, other = (p.Shard.local_shard_size_and_offset(size, parts, rank)
                          for p in (ours, theirs))  # fmt: skip
            assert own == tuple(other), (size, parts, rank)


@pytest.mark.parametrize(
    "make", [lambda p: p.Shard(1), lambda p: p._StridedShard(1, split_factor=2)]
)
@pytest.mark.parametrize(("size", "parts", "padding", "contiguous"), [
    (6, 3, True, True), (7, 3, True, False), (7, 3, False, True), (2, 4, True, True),
    (5, 4, False, False),
])  # fmt: skip
def test_all_parts_of_a_tensor_are_those_of_torch(make, size, parts, padding, contiguous):
    tensor = torch.arange(2 * size).reshape(2, size)
    asked = {"with_padding": padding, "contiguous": contiguous}
    found, pads = make(ours)._split_tensor(tensor, parts, **asked)
    expected, torch_pads = make(theirs)._split_tensor(tensor, parts, **asked)
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]
    assert pads == torch_pads
    assert all(part.is_contiguous() for part in found) or not contiguous
