"""What two ranks do in the tests of groups over NCCL, on the simulated one (issue G1 to G3)."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

import dure as dist
from dure.comm.backends.abort import AbortRecord
from dure.errors import Aborted, CommTimeout, Desync, PeerLost, UsageError
from dure.testing.accelerator import Stream
from tests.testing.accelerator import simulated_ranks
from tests.testing.accelerator.simulated_ranks import host_values, late
from tests.waiting import PATIENCE_S, until

MANY = 1 << 16


def run(names: list[str]) -> dict[str, str]:
    """Run the cases below on this rank; return its errors."""
    from tests.comm.backends.engine import nccl_ranks

    return simulated_ranks.run(nccl_ranks, names)


def _read_in(stream: Stream, tensor: Any) -> list[float]:
    """Return what a stream reads; the host waits for this stream only."""
    with stream:
        copy = tensor.clone()
    stream.synchronize()
    return host_values(copy)


def case_a_batch_in_both_directions_is_one_launch(rank: int, size: int) -> None:
    """Both ranks send first."""
    received, peer = torch.empty(MANY, device="sim"), 1 - rank
    send = dist.P2POp(dist.isend, late(rank + 1.0, MANY), peer)
    receive = dist.P2POp(dist.irecv, received, peer)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    assert received.sum().item() == (peer + 1.0) * MANY


def case_a_batch_is_waited_for_as_one(rank: int, size: int) -> None:
    """The wait for the receive alone."""
    received, peer = torch.empty(3, device="sim"), 1 - rank
    send = dist.P2POp(dist.isend, late(rank + 1.0), peer)
    receive = dist.P2POp(dist.irecv, received, peer)
    works = dist.batch_isend_irecv([receive, send])
    works[0].wait()
    assert received.clone().tolist() == [peer + 1.0] * 3
    works[1].wait()


def case_the_first_wait_orders_its_stream(rank: int, size: int) -> None:
    t = late(rank + 1.0)
    dist.all_reduce(t)
    assert (t + 0).tolist() == [3.0] * 3


def case_every_wait_orders_its_stream(rank: int, size: int) -> None:
    """Whichever is read first."""
    for number in range(3):
        streams, t = [Stream() for _ in range(3)], late(rank + 1.0)
        work = dist.all_reduce(t, async_op=True)
        for stream in streams:
            with stream:
                work.wait()
        assert _read_in(streams[number], t) == [3.0] * 3


def case_every_wait_for_several_works_orders_its_stream(rank: int, size: int) -> None:
    tensors, side = [late(rank + 1.0), late(rank + 3.0)], Stream()
    work = dist.all_reduce_coalesced(tensors, async_op=True)
    assert work is not None
    work.wait()
    with side:
        work.wait()
    assert [_read_in(side, t) for t in tensors] == [[3.0] * 3, [7.0] * 3]


def case_results_that_are_copied_are_ordered_too(rank: int, size: int) -> None:
    """The first wait copies the result out of memory of the engine."""
    gathered, side = [torch.empty(3, device="sim") for _ in range(2)], Stream()
    work = dist.all_gather(gathered, late(rank + 1.0), async_op=True)
    first = Stream()
    with first:
        work.wait()
    with side:
        work.wait()
    assert [_read_in(side, t) for t in gathered] == [[1.0] * 3, [2.0] * 3]


def case_inputs_are_those_of_the_calling_stream(rank: int, size: int) -> None:
    """Which has still to write them, when another stream waits for the result."""
    side = Stream()
    with side:
        t = late(rank + 1.0)
        work = dist.all_reduce(t, async_op=True)
    assert work is not None
    work.wait()
    assert (t + 0).tolist() == [3.0] * 3


def case_a_receive_that_has_ended_has_run(rank: int, size: int) -> None:
    """So that a stream may read it that does not wait."""
    peer, received = 1 - rank, torch.empty(3, device="sim")
    send = dist.P2POp(dist.isend, late(rank + 1.0), peer)
    works = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, received, peer)])
    until = time.monotonic() + PATIENCE_S
    while not works[1].is_completed():
        assert time.monotonic() < until
    assert host_values(received) == [peer + 1.0] * 3
    works[0].wait()


def case_a_wait_with_a_limit_orders_the_callers_stream(rank: int, size: int) -> None:
    """For a single message, whose end is asked for in the meantime."""
    side, t = Stream(), late(rank + 1.0)
    side.wait_stream(torch.get_device_module("sim").current_stream())
    with side:
        work = dist.isend(t, 1) if rank == 0 else dist.irecv(t, 0)
        work.wait(PATIENCE_S)
        copy = t.clone()
    side.synchronize()
    assert host_values(copy) == [1.0] * 3


def case_a_barrier_waits_for_work_of_the_current_stream(rank: int, size: int) -> None:
    t: Any = late(rank + 1.0)
    group: Any = dist.group.WORLD
    dist.all_reduce(t)
    from dure.comm.call import Call

    group._backends["sim"].run(Call(op="barrier"), False)
    assert host_values(t) == [3.0] * 3


def case_what_was_waited_for_ends_before_the_group(rank: int, size: int) -> None:
    group = dist.new_group([0, 1])
    t = late(rank + 1.0)
    dist.all_reduce(t, group=group)
    dist.destroy_process_group(group)
    assert t.tolist() == [3.0] * 3


def case_a_group_is_left_when_its_operations_have_ended(rank: int, size: int) -> None:
    """Also those that nothing has waited for, as in torch."""
    group, t = dist.new_group([0, 1]), late(rank + 1.0)
    gathered = torch.empty(2, device="sim")
    works = [
        dist.all_reduce(t, group=group, async_op=True),
        dist.all_gather_single(gathered, late(rank + 1.0, 1), group=group, async_op=True),
    ]
    dist.destroy_process_group(group)
    assert (host_values(t), host_values(gathered)) == ([3.0] * 3, [1.0, 2.0])
    for work in works:
        work.wait()


def case_an_aborted_group_does_not_wait(rank: int, size: int) -> None:
    group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    dist.all_reduce(late(1.0), group=group)
    torch.get_device_module("sim").synchronize()
    dist.all_gather_object([None, None], rank)
    if rank == 0:
        work = dist.all_reduce(late(1.0), group=group, async_op=True)
        engine = group._backends["sim"]._engine._engine
        group.abort()
        assert isinstance(engine._communicators["all"].error, Aborted)
        with pytest.raises(Aborted):
            work.wait()
    dist.all_gather_object([None, None], rank)


def case_a_group_whose_peer_is_missing_is_left_with_an_error(rank: int, size: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    dist.all_reduce(late(1.0), group=group)
    torch.get_device_module("sim").synchronize()
    if rank == 0:
        dist.all_reduce(late(1.0), group=group, async_op=True).disown()
        with pytest.raises(CommTimeout) as caught:
            dist.destroy_process_group(group)
        assert caught.value.missing == (1,)
    dist.all_gather_object([None, None], rank)


# ---- the watchdog --------------------------------------------------------------------------------


def run_with_limit(names: list[str]) -> dict[str, str]:
    """Run cases on this rank, which ends if they hang: no other rank would end it."""
    limit = threading.Timer(min(PATIENCE_S, 40), os._exit, (1,))
    limit.daemon = True
    limit.start()
    if "another_host" in names[0]:
        os.environ["DURE_HOST_ID"] = f"host {os.environ['RANK']}"
    return run(names)


def _die() -> None:
    os._exit(0)


def _made(group: Any = None) -> None:
    """Make the group's communicator, and wait until all ranks have."""
    dist.all_reduce(late(1.0), group=group)
    torch.get_device_module("sim").synchronize()
    dist.all_gather_object([None] * dist.get_world_size(), dist.get_rank())


def _abandoned(group: Any) -> bool:
    """Return whether the communicator was aborted, waiting for it."""
    engine = group._backends["sim"]._engine._engine
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if isinstance(engine._communicators["all"].error, Aborted):
            return True
        time.sleep(0.01)
    return False


def _lost(error: Any) -> tuple[int | None, int | None, str]:
    return error.peer, error.rank, error.op


def case_death_is_an_error_of_pending_operations_and_later_ones(rank: int, size: int) -> None:
    _made()
    if rank == 1:
        _die()
    group: Any = dist.group.WORLD
    work = dist.all_reduce(late(1.0), async_op=True)
    assert work is not None
    assert _abandoned(group)
    for call in (work.wait, lambda: dist.all_reduce(late(1.0)), lambda: work.wait(1.0)):
        with pytest.raises(PeerLost) as caught:
            call()
        assert _lost(caught.value) == (1, 0, "all_reduce")
    assert caught.value.pid and "ended" in str(caught.value)


def case_death_ends_a_host_that_waits_for_the_device(rank: int, size: int) -> None:
    """As `item()` does: it returns, with whatever the memory has."""
    _made()
    if rank == 1:
        _die()
    t = late(1.0)
    dist.all_reduce(t)
    t.tolist()
    with pytest.raises(PeerLost):
        dist.all_reduce(t)


def case_death_ends_a_host_that_makes_a_communicator(rank: int, size: int) -> None:
    dist.all_gather_object([None, None], rank)
    if rank == 1:
        _die()
    with pytest.raises(PeerLost) as caught:
        dist.all_reduce(late(1.0))
    assert _lost(caught.value) == (1, 0, "all_reduce")


def case_death_ends_a_host_that_waits_for_a_first_message(rank: int, size: int) -> None:
    _made()
    if rank == 1:
        _die()
    with pytest.raises(PeerLost) as caught:
        dist.isend(late(1.0), 1)
    assert _lost(caught.value)[:2] == (1, 0), caught.value.op


def case_death_on_another_host_is_known_from_hybrid(rank: int, size: int) -> None:
    """By the connection of the hosts; then an operation has been aborted, and none begins."""
    group: Any = dist.group.WORLD
    assert len(group.hosts) == 2
    _made()
    if rank == 1:
        _die()
    work = dist.all_reduce(late(1.0), async_op=True)
    assert work is not None
    assert _abandoned(group)
    for call in (work.wait, lambda: dist.all_reduce(late(1.0))):
        with pytest.raises(PeerLost) as caught:
            call()
        assert _lost(caught.value) == (1, 0, "all_reduce")


def case_death_on_another_host_after_leaving_is_none(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    assert len(group.hosts) == 2
    _made()
    t = late(rank + 1.0)
    work = dist.all_reduce(t, async_op=True)
    engine = group._backends["sim"]
    if rank == 1:
        dist.destroy_process_group()
        _die()
    until(lambda: engine._deaths.has_died(1), "the end of rank 1 to be known")
    assert engine.look()
    work.wait()
    assert t.tolist() == [3.0] * 3


def case_death_ends_destroy_process_group(rank: int, size: int) -> None:
    group: Any = dist.new_group([0, 1])
    _made(group)
    if rank == 1:
        _die()
    dist.all_reduce(late(1.0), group=group, async_op=True).disown()
    dist.destroy_process_group(group)


def case_death_is_known_to_a_group_without_cpu_tensors(rank: int, size: int) -> None:
    group: Any = dist.new_group([0, 1], backend="sim:simulated_nccl")
    _made(group)
    if rank == 1:
        _die()
    dist.all_reduce(late(1.0), group=group)
    assert _abandoned(group)
    with pytest.raises(PeerLost) as caught:
        dist.all_reduce(late(1.0), group=group)
    assert _lost(caught.value) == (1, 0, "all_reduce")


def case_death_after_leaving_is_none(rank: int, size: int) -> None:
    """What rank 1 took part in before it left ends, and gives its values."""
    groups: Any = [dist.new_group([0, 1], backend="sim:simulated_nccl") for _ in range(2)]
    for group in groups:
        _made(group)
    t = late(rank + 1.0)
    work = dist.all_reduce(t, group=groups[0], async_op=True)
    if rank == 1:
        dist.destroy_process_group()
        _die()
    time.sleep(2)
    assert not groups[0]._backends["sim"]._state.record
    work.wait()
    assert t.tolist() == [3.0] * 3


def case_a_late_peer_ends_operations_that_no_host_waits_for(rank: int, size: int) -> None:
    group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    _made(group)
    if rank == 0:
        dist.all_reduce(late(1.0), group=group)
        assert _abandoned(group)
        with pytest.raises(CommTimeout) as caught:
            dist.all_reduce(late(1.0), group=group)
        assert caught.value.missing == (1,)
    dist.all_gather_object([None, None], rank)


def case_a_late_peer_ends_the_first_operation(rank: int, size: int) -> None:
    """By the group's timeout, and the group with it."""
    group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    if rank == 0:
        for _ in range(2):
            with pytest.raises(CommTimeout) as caught:
                dist.all_reduce(late(1.0), group=group)
            assert caught.value.missing == (1,)
    dist.all_gather_object([None, None], rank)


def case_a_late_peer_ends_the_first_message(rank: int, size: int) -> None:
    group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    _made(group)
    if rank == 0:
        with pytest.raises(CommTimeout) as caught:
            dist.isend(late(1.0), 1, group=group)
        assert caught.value.missing == (1,), caught.value.op
        assert "called their first operation" in str(caught.value)  # found before NCCL is called
    dist.all_gather_object([None, None], rank)


def case_a_first_message_and_a_first_collective_are_a_deadlock(rank: int, size: int) -> None:
    """Also in a group of two ranks they make two communicators."""
    group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    calls = [
        lambda: dist.all_reduce(late(1.0), group=group),
        lambda: dist.send(late(1.0), 0, group),
    ]
    with pytest.raises(Desync) as caught:
        calls[rank]()
    assert caught.value.calls == {
        0: "all_reduce (its first; waits for rank 1)",
        1: "send to rank 0 (its first; waits for rank 0)",
    }
    dist.all_gather_object([None, None], rank)


def case_an_abort_ends_a_host_that_makes_a_communicator(rank: int, size: int) -> None:
    group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    if rank == 0:
        timer = threading.Timer(0.3, group.abort)
        timer.start()
        with pytest.raises(Aborted):
            dist.all_reduce(late(1.0), group=group)
        timer.join()
    dist.all_gather_object([None, None], rank)


def case_operations_that_have_ended_are_not_late(rank: int, size: int) -> None:
    group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    _made(group)
    work = dist.all_reduce(late(1.0), group=group, async_op=True)
    dist.all_reduce(late(1.0), group=group)
    torch.get_device_module("sim").synchronize()
    time.sleep(2.5)
    assert work is not None
    work.wait()
    dist.all_reduce(late(1.0), group=group)
    dist.all_gather_object([None, None], rank)


def case_a_group_that_is_being_destroyed_may_be_aborted(rank: int, size: int) -> None:
    """By another thread."""
    group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    _made(group)
    if rank == 0:
        dist.all_reduce(late(1.0), group=group, async_op=True).disown()
        timer = threading.Timer(0.3, group.abort)
        timer.start()
        began = time.monotonic()
        dist.destroy_process_group(group)
        timer.join()
        assert time.monotonic() - began < PATIENCE_S / 2
    dist.all_gather_object([None, None], rank)


# ---- coalescing managers -------------------------------------------------------------------------


def case_a_coalescing_manager_is_one_launch(rank: int, size: int) -> None:
    """So an order in the block that differs between ranks is no deadlock."""
    group: Any = dist.group.WORLD
    tensors, gathered = [late(rank + 1.0), late(rank + 3.0)], torch.empty(2, device="sim")
    received, least = torch.empty(3, device="sim"), late(rank + 5.0)
    engine = group._backends["sim"]._engine._engine
    _made()
    before = engine._communicators["all"].stream.num_queued
    with dist.coalescing_manager():
        for t in tensors:
            dist.all_reduce(t)
        dist.all_gather_single(gathered, late(rank + 1.0, 1))
        dist.isend(late(rank + 1.0), 1 - rank).disown()
        dist.irecv(received, 1 - rank)
        dist.all_reduce(least, dist.ReduceOp.MIN)
    assert [t.tolist() for t in tensors] == [[3.0] * 3, [7.0] * 3]
    assert (gathered.tolist(), received.tolist()) == ([1.0, 2.0], [2.0 - rank] * 3)
    assert least.tolist() == [5.0] * 3
    # One wait for the current stream, and two pieces of work: see accelerator/communicator.py.
    assert engine._communicators["all"].stream.num_queued - before == 3


def case_a_coalescing_manager_that_does_not_wait(rank: int, size: int) -> None:
    t = late(rank + 1.0)
    with dist.coalescing_manager(async_ops=True) as started:
        dist.all_reduce(t)
    started.wait()
    assert t.clone().tolist() == [3.0] * 3


def case_a_wait_inside_a_coalescing_manager_is_refused(rank: int, size: int) -> None:
    t = late(rank + 1.0)

    def wait_inside() -> None:
        with dist.coalescing_manager():
            work: Any = dist.all_reduce(t, async_op=True)
            work.wait()

    with pytest.raises(UsageError, match="before the batch has started"):
        wait_inside()
    dist.all_reduce(t)
    dist.all_gather_object([None, None], rank)


def case_an_error_inside_a_coalescing_manager_leaves_the_group_usable(rank: int, size: int) -> None:
    t = late(rank + 1.0)

    def fail_inside() -> None:
        with dist.coalescing_manager():
            dist.all_reduce(t)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    u = late(rank + 1.0)
    dist.all_reduce(u)
    assert (t.tolist(), u.tolist()) == ([3.0] * 3, [3.0] * 3)


# ---- waits for operations that are aborted -------------------------------------------------------


def case_waits_for_aborted_operations_raise(rank: int, size: int) -> None:
    """Before, while and after; NCCL's own work has no error, and counts as ended."""
    from dure.testing.accelerator.nccl import SimulatedWork

    group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    _made(group)
    if rank == 0:
        batch = [dist.P2POp(op, late(1.0), 1, group=group) for op in (dist.isend, dist.irecv)]
        works = [dist.all_reduce(late(1.0), group=group, async_op=True)]
        works += dist.batch_isend_irecv(batch)
        silent: Any = SimulatedWork
        silent.wait = silent.synchronize = lambda self, timeout=None: True
        timer = threading.Timer(0.3, group.abort)
        timer.start()
        assert works[0] is not None
        with pytest.raises(Aborted):
            works[0].wait(30)
        timer.join()
        for work in works:
            with pytest.raises(Aborted):
                work.wait()
            assert work.is_completed() and not work.is_success()
    dist.all_gather_object([None, None], rank)


def case_a_coalescing_manager_of_a_broken_group_lets_other_threads_call(
    rank: int, size: int
) -> None:
    """They get the error, too."""
    group: Any = dist.new_group([0, 1], backend="sim:simulated_nccl")
    _made(group)
    group._backends["sim"]._state.adopt(AbortRecord.gone(1 - rank))
    with pytest.raises(PeerLost), dist.coalescing_manager(group):
        raise AssertionError("it has begun")
    with ThreadPoolExecutor() as other:
        call = other.submit(dist.all_reduce, late(1.0), group=group)
        assert isinstance(call.exception(PATIENCE_S), PeerLost)
