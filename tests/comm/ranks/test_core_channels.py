"""The two channels of a group with thread-ranks: drawn interleavings, failures, closing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

import dure as dist
from dure.comm.world import current_world
from dure.errors import Desync, UsageError
from dure.testing import run_ranks
from tests.comm.channel_calls import plans, threads


@settings(max_examples=12)
@given(plan=plans)
def test_threads_of_both_channels_get_their_own_results_3_ranks(plan):
    run_ranks(3, lambda rank: threads(plan))


def _channels(rank: int) -> None:
    group = current_world().default
    assert group is not None
    second = group.channel(1)
    assert group.channel(0) is group and second.channel(0) is group
    assert group.channel(1) is second and second.channel(1) is second
    assert (second.rank(), second.size()) == (group.rank(), group.size())
    x = torch.full((3,), float(rank))
    dist.all_reduce(x, group=second)
    assert x.tolist() == [1.0, 1.0, 1.0]
    assert (group.seq, second.seq) == (0, 1)
    with pytest.raises(UsageError):
        group.channel(2)
    with pytest.raises(Desync) as told:
        dist.all_reduce(torch.ones(2 + rank), group=second)
    assert told.value.group == second.group_name != group.group_name


def test_a_channel_is_a_view_of_its_group_2_ranks():
    run_ranks(2, _channels)


def _closed(rank: int) -> None:
    group = current_world().default
    assert group is not None
    second = group.channel(1)
    group.close(abort=True)
    with pytest.raises(UsageError):
        second.barrier()


def test_a_channel_is_closed_with_its_group_2_ranks():
    run_ranks(2, _closed)
