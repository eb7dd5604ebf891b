"""What two ranks do in the tests of the simulated NCCL."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import dure as dist
from dure.errors import Aborted, CommTimeout, Desync, PeerLost
from dure.testing.accelerator import Stream
from tests.testing.accelerator import simulated_ranks
from tests.testing.accelerator.simulated_ranks import host_values, late
from tests.waiting import PATIENCE_S

SHORT, LONG = timedelta(seconds=0.5), timedelta(seconds=20)
GARBAGE = pytest.approx(float("nan"), nan_ok=True)


def run(names: list[str]) -> dict[str, str]:
    """Run the cases below on this rank; return its errors."""
    from tests.testing.accelerator import nccl_ranks

    return simulated_ranks.run(nccl_ranks, names)


def case_a_result_without_a_wait_is_garbage(rank: int, size: int) -> None:
    """Also after the host has waited for the stream that reads it."""
    gathered = torch.empty(2, device="sim")
    work = dist.all_gather_single(gathered, late(rank + 1.0, 1), async_op=True)
    early = gathered.clone()
    torch.get_device_module("sim").current_stream().synchronize()
    assert host_values(early) == [GARBAGE] * 2
    work.wait()
    assert gathered.tolist() == [1.0, 2.0]


def case_a_wait_in_another_stream_does_not_order_this_one(rank: int, size: int) -> None:
    t, side = late(rank + 1.0), Stream()
    work = dist.all_reduce(t, async_op=True)
    with side:
        work.wait()
    early = t.clone()
    assert early.tolist() == [rank + 1.0] * 3
    side.synchronize()
    assert t.tolist() == [3.0] * 3


def case_an_input_that_is_overwritten_too_early_is_what_ranks_get(rank: int, size: int) -> None:
    t, side = late(rank + 1.0), Stream()
    with side:  # lacks side.wait_stream(current_stream())
        work = dist.all_reduce(t, async_op=True)
        work.wait()
    side.synchronize()
    assert host_values(t) == [GARBAGE] * 3


def case_work_has_ended_when_it_has_run(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    engine = group._backends["sim"]._engine._engine
    t = late(rank + 1.0)
    work = engine.allreduce([t])
    assert not work.is_completed() and not work.is_success()
    assert work.wait() and not work.is_completed()
    assert t.tolist() == [3.0] * 3
    assert work.is_completed() and work.is_success() and work.exception() is None


def case_a_program_that_asks_again_and_again_gets_an_end(rank: int, size: int) -> None:
    t = late(rank + 1.0)
    work = dist.all_reduce(t, async_op=True)
    until = time.monotonic() + PATIENCE_S
    while not work.is_completed():
        assert time.monotonic() < until
        time.sleep(0.001)
    assert host_values(t) == [3.0] * 3


def case_different_orders_are_named(rank: int, size: int) -> None:
    t = late(1.0)
    works = [dist.broadcast, dist.all_reduce] if rank else [dist.all_reduce, dist.broadcast]
    for call in works:
        call(t, 0) if call is dist.broadcast else call(t)
    with pytest.raises(Desync) as caught:
        t.tolist()
    first, second = caught.value.calls[0], caught.value.calls[1]
    assert (first, second) == (
        "all_reduce (SUM) of 3 float32",
        "broadcast from 0 of 12 uint8",
    )
    with pytest.raises(Desync):
        dist.all_reduce(t)


def case_messages_that_are_not_grouped_are_a_deadlock(rank: int, size: int) -> None:
    t, peer = late(1.0), 1 - rank
    dist.isend(t, peer).disown()
    dist.irecv(t, peer).wait()
    with pytest.raises(Desync) as caught:
        t.tolist()
    assert caught.value.calls == {
        0: "send of 12 uint8 to rank 1 (waits for rank 1)",
        1: "send of 12 uint8 to rank 0 (waits for rank 0)",
    }


def case_messages_and_a_collective_in_different_orders_are_a_deadlock(rank: int, size: int) -> None:
    t, peer = late(1.0), 1 - rank
    batch = [dist.P2POp(dist.irecv if rank else dist.isend, t, peer)]
    if rank == 0:
        dist.batch_isend_irecv(batch)[0].wait()
    dist.all_reduce(t)
    if rank == 1:
        dist.batch_isend_irecv(batch)[0].wait()
    with pytest.raises(Desync) as caught:
        t.tolist()
    assert caught.value.calls == {
        0: "send of 12 uint8 to rank 1 (waits for rank 1)",
        1: "all_reduce (SUM) of 3 float32 (waits for rank 0)",
    }


def case_an_alternating_order_of_messages_is_none(rank: int, size: int) -> None:
    """One rank receives first: then single messages need no group call."""
    mine, theirs, peer = late(rank + 1.0), late(0.0), 1 - rank
    for send in (rank == 0, rank == 1):
        (dist.isend(mine, peer) if send else dist.irecv(theirs, peer)).wait()
    assert theirs.tolist() == [peer + 1.0] * 3


def case_a_rank_that_does_not_launch_is_missing(rank: int, size: int) -> None:
    group = dist.new_group([0, 1], timeout=SHORT)
    t = late(1.0)
    dist.all_reduce(t, group=group)
    assert t.tolist() == [2.0] * 3
    if rank == 0:
        dist.all_reduce(t, group=group)
        with pytest.raises(CommTimeout) as caught:
            t.tolist()
        assert (caught.value.missing, caught.value.rank) == ((1,), 0)
    dist.all_gather_object([None, None], rank)


def case_a_rank_whose_first_operation_is_missing(rank: int, size: int) -> None:
    """A communicator is made by the first operation of all its ranks, which blocks the host."""
    group = dist.new_group([0, 1], timeout=SHORT)
    if rank == 0:
        with pytest.raises(CommTimeout) as caught:
            dist.all_reduce(late(1.0), group=group)
        assert caught.value.missing == (1,)
    dist.all_gather_object([None, None], rank)


def case_a_rank_that_has_left_is_lost(rank: int, size: int) -> None:
    group = dist.new_group([0, 1])
    t = late(1.0)
    dist.all_reduce(t, group=group)
    if rank == 1:
        dist.destroy_process_group(group)
        dist.all_gather_object([None, None], rank)
        return
    dist.all_gather_object([None, None], rank)
    dist.all_reduce(t, group=group)
    with pytest.raises(PeerLost) as caught:
        t.tolist()
    assert caught.value.peer == 1


def case_a_host_that_sleeps_serves_the_others(rank: int, size: int) -> None:
    """Rank 1 waits for a message of rank 0 that is sent after rank 0 has its sum."""
    t, group = late(rank + 1.0), dist.new_group([0, 1], timeout=LONG)
    dist.all_reduce(t, group=group)
    if rank == 0:
        dist.send(torch.tensor(t.tolist()), 1)
    else:
        received = torch.empty(3)
        dist.recv(received, 0)
        assert received.tolist() == [3.0] * 3
    assert t.tolist() == [3.0] * 3


def case_a_host_that_computes_serves_nobody(rank: int, size: int) -> None:
    """Rank 1 computes, while rank 0 waits for what it sends."""
    t = late(rank + 1.0)
    dist.all_reduce(t)
    if rank == 1:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
        assert host_values(t) == [GARBAGE] * 3
    assert t.tolist() == [3.0] * 3


def case_communicators_of_a_rank_run_side_by_side(rank: int, size: int) -> None:
    """Two groups, whose operations the ranks launch, and wait for, in different orders."""
    groups = _two_groups(None)
    tensors = [late(1.0), late(2.0)]
    order = (1, 0) if rank else (0, 1)
    works = {n: dist.all_reduce(tensors[n], group=groups[n], async_op=True) for n in order}
    found = {}
    for number in order:
        works[number].wait()
        found[number] = tensors[number].tolist()
    assert found == {0: [2.0] * 3, 1: [4.0] * 3}


def case_a_circle_through_two_communicators_ends_by_the_timeout(rank: int, size: int) -> None:
    """Each rank's second operation waits in its stream for the first one."""
    t, groups = late(1.0), _two_groups(SHORT)
    for number in (1, 0) if rank else (0, 1):
        dist.all_reduce(t, group=groups[number])
    with pytest.raises(CommTimeout) as caught:
        t.tolist()
    assert caught.value.missing == (1 - rank,)
    dist.all_gather_object([None, None], rank)


def _two_groups(timeout: timedelta | None) -> list[Any]:
    """Make two groups, with their communicators."""
    groups = [dist.new_group([0, 1], timeout=timeout) for _ in range(2)]
    for group in groups:
        dist.all_reduce(late(0.0), group=group)
    return groups


def case_operations_of_an_aborted_group_fail(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    t = late(1.0)
    dist.all_reduce(t)
    t.tolist()
    engine = group._backends["sim"]._engine._engine
    work = engine.allreduce([t])
    engine.abort()
    assert work.is_completed() and not work.is_success()
    with pytest.raises(Aborted):
        work.wait()


def case_seeds_change_no_value_of_a_correct_program(rank: int, size: int) -> None:
    from dure.testing import accelerator

    for seed in range(5):
        accelerator.install(seed)
        total, side = late(0.0), Stream()
        for step in range(4):
            t = late(rank + float(step))
            work = dist.all_reduce(t, async_op=True)
            with side:
                work.wait()
                t.mul_(2)
            torch.get_device_module("sim").current_stream().wait_stream(side)
            total += t
        assert total.tolist() == [2.0 * (1 + 3 + 5 + 7)] * 3


def case_of_3_a_ring_of_single_messages_is_a_deadlock(rank: int, size: int) -> None:
    """Each host waits in its first message until the next rank has called it, too."""
    group = dist.new_group([0, 1, 2], timeout=LONG)
    with pytest.raises(Desync) as caught:
        dist.isend(late(1.0), (rank + 1) % 3, group=group)
    assert (caught.value.rank, caught.value.world_size) == (rank, 3)
    assert caught.value.calls == {
        0: "send to rank 1 (its first; waits for rank 1)",
        1: "send to rank 2 (its first; waits for rank 2)",
        2: "send to rank 0 (its first; waits for rank 0)",
    }


def case_of_3_a_ring_in_a_batch_is_none(rank: int, size: int) -> None:
    received = torch.empty(3, device="sim")
    send = dist.P2POp(dist.isend, late(rank + 1.0), (rank + 1) % 3)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % 3)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    assert received.tolist() == [(rank - 1) % 3 + 1.0] * 3


def case_of_3_a_ring_in_which_one_rank_receives_first_is_none(rank: int, size: int) -> None:
    received = torch.empty(3, device="sim")
    for sends in (rank > 0, rank == 0):
        if sends:
            work = dist.isend(late(rank + 1.0), (rank + 1) % 3)
        else:
            work = dist.irecv(received, (rank - 1) % 3)
        work.wait()
    assert received.tolist() == [(rank - 1) % 3 + 1.0] * 3
