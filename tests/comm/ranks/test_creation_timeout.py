"""How long creating a group waits: the timeout that was given; five minutes where none was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

import dure as dist
from dure.comm import creation, init
from dure.device_mesh import init_device_mesh
from dure.errors import RendezvousTimeout
from dure.testing import run_ranks
from dure.testing.ranks import new_world
from tests.waiting import PATIENCE_S, until

AT_ONCE, LONG = timedelta(microseconds=1), timedelta(seconds=PATIENCE_S)


@pytest.fixture
def hurried(monkeypatch):
    """Without a timeout of the program's, ranks that are late are not waited for at all."""
    for module in (creation, init):
        monkeypatch.setattr(module, "RENDEZVOUS_LIMIT", AT_ONCE)


def _subgroup() -> None:
    dist.new_group([0, 1], timeout=LONG)


def _own_subgroup() -> None:
    dist.new_group([0, 1], timeout=LONG, use_local_synchronization=True)


def _inheriting_subgroup() -> None:
    dist.new_group([0, 1])


def _mesh() -> None:
    init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))


def _split() -> None:
    dist.split_group(split_ranks=[[0, 1]])


def _subgroups() -> None:
    dist.new_subgroups(2)


def _shrunk() -> None:
    dist.shrink()


MAKERS = [_subgroup, _own_subgroup, _inheriting_subgroup, _mesh, _split, _subgroups, _shrunk]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.usefixtures("hurried")
def test_creation_waits_as_long_as_the_program_said(make: Callable[[], None]):
    waiting = threading.Event()

    def body(rank: int) -> None:
        if rank == 1:
            waiting.wait(0.05)  # rank 0 has come to wait by then, or the test proves less
        make()
        waiting.set()

    run_ranks(2, body)


@pytest.mark.usefixtures("hurried")
def test_without_a_timeout_joining_waits_for_the_limit_alone():
    with new_world(), pytest.raises(RendezvousTimeout) as caught:
        dist.init_process_group("threads", store=dist.HashStore(), rank=0, world_size=2)
    assert caught.value.missing == (1,)


def test_a_group_may_be_waited_for_longer_than_an_operation_of_the_world():
    short = timedelta(milliseconds=1)
    waiting: list[dist.ProcessGroup] = []
    ended = threading.Event()

    def body(rank: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        dist.barrier()
        group.set_timeout(short)
        if rank == 0:
            waiting.append(group)
        else:  # rank 0 waits by now, for the new group, or has given up
            until(lambda: ended.is_set() or (waiting and waiting[0].timeout == LONG))
            assert not ended.is_set(), "rank 0 has given up"
        try:
            dist.new_group(timeout=LONG)
        finally:
            ended.set()
        assert group.timeout == short
        group.set_timeout(LONG)
        dist.barrier()

    run_ranks(2, body)


def test_members_alone_that_pass_different_ranks_time_out_and_name_the_missing():
    def body(rank: int) -> tuple[int, ...]:
        ranks = [0, 1] if rank == 0 else [0, 1, 2]
        with pytest.raises(RendezvousTimeout) as info:
            dist.new_group(ranks, timeout=AT_ONCE, use_local_synchronization=True)
        return info.value.missing

    first, *others = run_ranks(3, body)
    assert first == (1,)
    assert all(0 in missing for missing in others)
