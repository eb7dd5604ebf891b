"""The two channels of a group over shared memory: drawn interleavings, errors, records."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

import dure as dist
from dure.comm.world import current_world
from dure.errors import Desync, RendezvousTimeout

pytestmark = pytest.mark.needs("engine")


def _group() -> dist.ProcessGroup:
    group = current_world().default
    assert group is not None
    return group


def _wrong_order(rank: int) -> tuple[str | None, dict[int, str]]:
    """Let two threads call on one channel, on each rank in another order."""
    second = _group().channel(1)
    found: list[Desync] = []

    def call(count: int) -> None:
        try:
            second.all_reduce(torch.ones(count))
        except Desync as error:
            found.append(error)

    loader = threading.Thread(target=call, args=(3,), name="the loader")
    if rank == 0:
        loader.start()
        loader.join()
    else:
        call(2)
    return found[0].group, dict(found[0].calls)


def test_orders_that_differ_between_ranks_name_the_threads_2_ranks(process_pool):
    for group, calls in process_pool(2, "shm").run(_wrong_order):
        assert group is not None and group.endswith("[1]")
        assert calls[0].endswith("thread the loader")
        assert "thread" not in calls[1]


def _made_at_the_second_attempt(rank: int) -> float:
    """Let rank 1 come when rank 0 has given up the first attempt at a second channel."""
    group = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=1))
    assert isinstance(group, dist.ProcessGroup)
    store = _group().get_group_store()
    if rank == 0:
        with pytest.raises(RendezvousTimeout) as caught:
            group.channel(1)
        assert caught.value.missing == (1,)
        store.set("given up", "")
    else:
        store.wait(["given up"])
    x = torch.ones(1)
    group.channel(1).all_reduce(x)
    return x.item()


def test_a_second_channel_can_be_made_after_a_failed_attempt_2_ranks(process_pool):
    assert process_pool(2, "shm").run(_made_at_the_second_attempt) == [2.0, 2.0]
