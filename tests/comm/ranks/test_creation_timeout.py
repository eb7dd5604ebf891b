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
from tests.waiting import PATIENCE_S

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


def _world_without_a_timeout(then: Callable[[], object]) -> list[BaseException]:
    """Join with two ranks that give no timeout; rank 0 alone calls `then`; return its errors."""
    errors: list[BaseException] = []
    store, ended = dist.HashStore(), threading.Event()

    def be(rank: int) -> None:
        with new_world():
            dist.init_process_group("threads", store=store, rank=rank, world_size=2)
            try:
                if rank == 0:
                    then()
                else:
                    ended.wait(PATIENCE_S)
            except RendezvousTimeout as error:
                errors.append(error)
            ended.set()
            dist.destroy_process_group()

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return errors


@pytest.mark.parametrize("make", [_inheriting_subgroup, _split])
def test_without_a_timeout_a_group_waits_for_the_limit_alone(monkeypatch, make):
    def hurry() -> None:
        group = dist.group.WORLD
        assert group is not None
        assert group.creation_timeout == creation.RENDEZVOUS_LIMIT
        group.creation_timeout = AT_ONCE
        make()

    (error,) = _world_without_a_timeout(hurry)
    assert isinstance(error, RendezvousTimeout)


@pytest.mark.usefixtures("hurried")
def test_a_timeout_that_is_set_later_counts_for_groups_made_from_then_on():
    def body(rank: int) -> timedelta:
        group = dist.group.WORLD
        assert group is not None
        group.set_timeout(timedelta(seconds=2 * PATIENCE_S))
        return dist.new_group().creation_timeout

    assert run_ranks(2, body) == [timedelta(seconds=2 * PATIENCE_S)] * 2


def test_a_group_may_be_waited_for_longer_than_an_operation_of_the_world():
    waiting = threading.Event()

    def body(rank: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        dist.barrier()
        group.set_timeout(timedelta(milliseconds=1))
        if rank == 1:
            waiting.wait(0.05)  # far more than operations of the world wait
        dist.new_group(timeout=LONG)
        assert group.timeout == timedelta(milliseconds=1)
        group.set_timeout(LONG)
        dist.barrier()

    run_ranks(2, body)
