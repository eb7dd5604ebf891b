"""The two channels of a group over shared memory: drawn interleavings, errors, records."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dure as dist
from dure.comm.world import current_world
from dure.errors import Desync
from dure.trace.flight import recorded
from tests.comm.channel_calls import one_thread, plans, threads

pytestmark = pytest.mark.needs("engine")

picks = st.lists(st.integers(0, 7), min_size=1, max_size=24)
waits = st.lists(st.integers(0, 23), min_size=1, max_size=24)


def _threads(rank: int, plan) -> None:
    del rank
    threads(plan)


def _one_thread(rank: int, plan, picks: list[int], waits: list[int]) -> None:
    del rank
    one_thread(plan, picks, waits)


@settings(max_examples=20)
@given(plan=plans)
def test_threads_of_both_channels_get_their_own_results_3_ranks(process_pool, plan):
    process_pool(3, "shm").run(_threads, plan)


@settings(max_examples=20)
@given(plan=plans, picks=picks, waits=waits)
def test_ranks_need_no_common_order_of_channels_3_ranks(process_pool, plan, picks, waits):
    process_pool(3, "shm").run(_one_thread, plan, picks, waits)


def _group() -> dist.ProcessGroup:
    group = current_world().default
    assert group is not None
    return group


def _numbers(rank: int) -> list[tuple[str, str, int]]:
    group = _group()
    for _ in range(2):
        group.barrier()
    group.channel(1).barrier()
    dist.all_reduce(torch.ones(2), group=group.channel(1), async_op=True).wait()
    del rank
    mine = [r for r in recorded() if r.op in ("barrier", "all_reduce")]
    return [(r.group, r.op, r.seq) for r in mine[-4:]]


def test_each_channel_has_its_own_numbers_in_the_records_2_ranks(process_pool):
    process_pool(2, "shm").run(_group_name)  # a pool of its own, where nothing has been called
    name = process_pool(2, "shm").run(_group_name)[0]
    for records in process_pool(2, "shm").run(_numbers):
        (a, b, c, d) = records
        assert a[:2] == b[:2] == (name, "barrier") and b[2] == a[2] + 1
        assert c[:2] == (f"{name}[1]", "barrier")
        assert d == (f"{name}[1]", "all_reduce", c[2] + 1)


def _group_name(rank: int) -> str:
    del rank
    return _group().group_name


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
