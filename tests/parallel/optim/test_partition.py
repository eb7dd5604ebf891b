"""Who updates which parameter: balance, ties, and groups that come later."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.parallel.optim.partition import ParameterPartition


def _tensors(sizes):
    return [torch.nn.Parameter(torch.empty(n)) for n in sizes]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 7))
def test_no_shard_gets_more_than_the_mean_and_one_parameter(sizes, num_shards):
    partition = ParameterPartition(range(num_shards), 0)
    partition.assign(_tensors(sizes))
    assert sorted(set(partition.owners)) <= list(range(num_shards))
    assert sum(partition.loads.values()) == sum(sizes)
    assert max(partition.loads.values()) <= sum(sizes) / num_shards + max(sizes)


def test_largest_go_first_and_ties_to_the_lowest_shard():
    partition = ParameterPartition(range(2), 0)
    partition.assign(_tensors([1, 10, 4, 6]))
    assert partition.owners == [0, 0, 1, 1]
    assert partition.loads == {0: 11, 1: 10}


def test_a_view_in_a_later_group_follows_its_base():
    base = torch.nn.Parameter(torch.zeros(4))
    partition = ParameterPartition(range(2), 0)
    partition.assign([torch.nn.Parameter(torch.zeros(9)), base])
    partition.assign([torch.nn.Parameter(base.data.view(2, 2))])
    assert partition.owners == [0, 1, 1]
