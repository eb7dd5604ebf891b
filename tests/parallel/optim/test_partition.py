"""Who updates which parameter: balance, ties, and groups that come later."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.parallel.optim.partition import Partition


def _tensors(sizes):
    return [torch.nn.Parameter(torch.empty(n)) for n in sizes]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 7))
def test_no_shard_gets_more_than_the_mean_and_one_parameter(sizes, num_shards):
    partition = Partition(range(num_shards), 0)
    partition.assign(_tensors(sizes))
    assert sorted(set(partition.owners)) <= list(range(num_shards))
    assert sum(partition.loads.values()) == sum(sizes)
    assert max(partition.loads.values()) <= sum(sizes) / num_shards + max(sizes)


def test_largest_go_first_and_ties_to_the_lowest_shard():
    partition = Partition(range(2), 0)
    partition.assign(_tensors([1, 10, 4, 6]))
    assert partition.owners == [0, 0, 1, 1]
    assert partition.loads == {0: 11, 1: 10}


def test_frozen_parameters_weigh_nothing():
    frozen, *trained = _tensors([100, 5, 5])
    frozen.requires_grad_(False)
    partition = Partition(range(2), 0)
    partition.assign([frozen, *trained])
    assert partition.loads == {0: 5, 1: 5}


def test_later_groups_do_not_move_earlier_ones():
    first, second = _tensors([3, 9, 4]), _tensors([8, 1])
    partition = Partition(range(3), 0)
    partition.assign(first)
    before = list(partition.owners)
    partition.assign(second)
    assert partition.owners[:3] == before
    assert len(partition.owners) == 5


def test_what_overlaps_has_one_owner():
    flat = torch.zeros(30)
    parts = [flat[0:10], flat[10:20], flat[5:12], torch.zeros(7), flat[20:30]]
    partition = Partition(range(2), 0)
    partition.assign([torch.nn.Parameter(p) for p in parts])
    assert len({partition.owners[i] for i in (0, 1, 2)}) == 1


def test_a_view_in_a_later_group_follows_its_base():
    base = torch.nn.Parameter(torch.zeros(4))
    partition = Partition(range(2), 0)
    partition.assign([torch.nn.Parameter(torch.zeros(9)), base])
    partition.assign([torch.nn.Parameter(base.data.view(2, 2))])
    assert partition.owners == [0, 1, 1]
