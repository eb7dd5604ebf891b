"""Groups of some ranks: who is in them, what they are called, and what misuse says."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import dure as dist
from dure.comm.subgroups import new_groups
from dure.errors import Desync, NotInGroupError, RendezvousTimeout, UsageError
from dure.testing import run_ranks
from tests.thread_ranks import on_ranks
from tests.waiting import PATIENCE_S

FILE = Path(__file__).name
TIMEOUT = timedelta(seconds=PATIENCE_S)


def test_new_group_members_only_see_each_other():
    def body(rank):
        group = dist.new_group([3, 1])
        if rank not in (1, 3):
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            return dist.get_rank(group), dist.get_world_size(group)
        t = torch.tensor([float(rank)])
        dist.all_reduce(t, group=group)
        assert t.item() == 4
        assert dist.get_global_rank(group, 1) == 3
        assert dist.get_group_rank(group, 1) == 0
        return dist.get_rank(group), dist.get_world_size(group)

    assert run_ranks(4, body) == [(-1, -1), (0, 2), (-1, -1), (1, 2)]


@pytest.mark.parametrize("array", [list, np.array, torch.tensor])
@on_ranks(3)
def test_new_group_unsorted_ranks_keep_the_order_given(rank, array):
    assert dist.get_rank(dist.new_group(array([2, 0, 1]), sort_ranks=False)) == [1, 2, 0][rank]


def test_new_group_with_local_synchronization_needs_members_only():
    def body(rank):
        if rank == 2:
            return None
        group = dist.new_group([0, 1], use_local_synchronization=True)
        t = torch.ones(1)
        dist.all_reduce(t, group=group)
        return t.item()

    assert run_ranks(3, body) == [2.0, 2.0, None]


def test_local_groups_that_were_not_made_leave_nothing_that_the_next_attempt_finds():
    met = threading.Barrier(2)

    def body(rank):
        if rank == 2:
            return None
        with pytest.raises(RendezvousTimeout):
            dist.new_group(
                ([0, 1], [0, 1, 2])[rank],
                timeout=timedelta(seconds=0.3),
                use_local_synchronization=True,
            )
        met.wait(PATIENCE_S)
        group = dist.new_group([0, 1], timeout=TIMEOUT, use_local_synchronization=True)
        t = torch.ones(1)
        dist.all_reduce(t, group=group)
        return t.item()

    assert run_ranks(3, body) == [2.0, 2.0, None]


@on_ranks(2)
def test_groups_do_not_mix_when_used_in_turn(rank):
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    x, y = torch.tensor([1.0]), torch.tensor([10.0])
    first = dist.all_reduce(x, group=a, async_op=True)
    second = dist.all_reduce(y, group=b, async_op=True)
    second.wait()
    first.wait()
    assert (x.item(), y.item()) == (2.0, 20.0)


@on_ranks(4)
def test_new_subgroups_cuts_the_world(rank):
    own, groups = dist.new_subgroups(2)
    t = torch.tensor([float(rank)])
    dist.all_reduce(t, group=own)
    assert (len(groups), dist.get_process_group_ranks(own), t.item()) == [
        (2, [0, 1], 1.0),
        (2, [0, 1], 1.0),
        (2, [2, 3], 5.0),
        (2, [2, 3], 5.0),
    ][rank]


@pytest.mark.parametrize("size", [0, 3, 5])
@on_ranks(4)
def test_new_subgroups_size_that_does_not_fit_raises(rank, size):
    with pytest.raises(UsageError):
        dist.new_subgroups(size)


def test_split_group_uses_ranks_of_the_parent():
    def body(rank):
        parent = dist.new_group([1, 2, 3])
        if rank == 0:
            return None
        part = dist.split_group(parent, [[0, 1], [2]])
        return dist.get_process_group_ranks(part)

    assert run_ranks(4, body) == [None, [1, 2], [1, 2], [3]]


@pytest.mark.parametrize("ranks", [[-1, 0], [0, 2], [0, 0], []])
@on_ranks(2)
def test_new_group_bad_ranks_raise_before_anything_is_sent(rank, ranks):
    with pytest.raises(UsageError):
        dist.new_group(ranks)
    dist.barrier()


def test_new_group_members_that_disagree_all_raise_desync():
    def body(rank):
        with pytest.raises(Desync) as caught:  # rank 2 is told, too: rank 0 named it
            dist.new_group([0, 1] if rank == 1 else [0, 1, 2])
        return sorted(caught.value.calls)

    assert run_ranks(3, body)[0] == [0, 1, 2]


@on_ranks(2)
def test_call_by_a_non_member_raises(rank):
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(NotInGroupError):
            dist.all_reduce(torch.ones(1), group=group)
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.get_backend(group)


# ---- many groups at once, and their keys ---------------------------------------------------------


def _axes(shape: tuple[int, ...]) -> list[list[int]]:
    """Return the ranks of every line of a grid along each of its axes."""
    grid = torch.arange(torch.Size(shape).numel()).reshape(shape)
    lines = [grid.movedim(axis, -1).reshape(-1, n).tolist() for axis, n in enumerate(shape)]
    return [ranks for axis in lines for ranks in axis]


def test_new_groups_makes_all_axes_of_a_mesh_at_once():
    def body(rank):
        groups = new_groups(_axes((2, 2, 2)))
        mine = [g for g in groups if g is not dist.GroupMember.NON_GROUP_MEMBER]
        sums = []
        for group in mine:
            t = torch.tensor([2.0**rank])
            dist.all_reduce(t, group=group)
            sums.append(t.item())
        return len(groups), [dist.get_process_group_ranks(g) for g in mine], sums

    found = run_ranks(8, body)
    assert found[0] == (12, [[0, 4], [0, 2], [0, 1]], [17.0, 5.0, 3.0])
    assert found[6] == (12, [[2, 6], [4, 6], [6, 7]], [68.0, 80.0, 192.0])


# ---- making a group is announced -----------------------------------------------------------------


@on_ranks(3)
def test_new_group_by_a_non_member_alone_is_a_desync_and_ends_nobody_elses_wait(rank):
    with pytest.raises(Desync) as caught:
        dist.new_group([0, 1]) if rank == 2 else dist.barrier()
    assert caught.value.calls[2].startswith("new_group([0, 1])")
