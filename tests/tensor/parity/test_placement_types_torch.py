"""Placements cut a dimension as torch's do."""

import itertools

import pytest
import torch
import torch.distributed.tensor.placement_types as theirs

import dure.tensor.placement_types as ours


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
