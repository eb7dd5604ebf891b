"""The two channels of a group with thread-ranks: drawn interleavings, failures, closing."""

from __future__ import annotations

import pytest
import torch

import dure as dist
from dure.comm.world import current_world
from dure.errors import Desync, UsageError
from dure.testing import run_ranks


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
