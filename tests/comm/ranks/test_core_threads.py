"""Threads that call collectives of one group at the same time: the second one is refused.

Then the group ends on all ranks, because nothing that follows is known to match.
"""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

import dure as dist
from dure.errors import Aborted, Desync, PeerLost, UsageError
from dure.testing import run_ranks
from dure.trace.flight import recorded
from tests.waiting import PATIENCE_S

BACKENDS = ["threads", "gloo", pytest.param("shm", marks=pytest.mark.needs("engine"))]


def _strided(group):
    """Return an all_reduce that takes the slow path, through Python, on every backend."""

    def all_reduce(t):
        wide = torch.stack([t, t], 1)
        group.all_reduce(wide[:, 0])
        t.copy_(wide[:, 0])

    return all_reduce


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("calls", ["plain", "strided", "both"])
def test_second_thread_is_refused_and_the_first_result_is_right(backend, calls):
    """Rank 0 has two threads; rank 1 calls when one of them has been refused."""
    refused, here = threading.Event(), []

    def body(rank):
        group = dist.group.WORLD
        fast, slow = group.all_reduce, _strided(group)
        tensors = [torch.ones(3), torch.ones(3)]
        ways = {"plain": (fast, fast), "strided": (slow, slow), "both": (fast, slow)}[calls]
        if rank == 1:
            refused.wait(PATIENCE_S)
            group.all_reduce(tensors[0])
            assert tensors[0].tolist() == [2.0] * 3
            with pytest.raises((Desync, PeerLost)):
                group.barrier()
            return
        errors = []

        def call(way, t):
            try:
                way(t)
            except UsageError as error:
                errors.append(str(error))
                refused.set()

        threads = [
            threading.Thread(target=call, args=pair, name=f"caller-{i}")
            for i, pair in enumerate(zip(ways, tensors, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (error,) = errors
        assert "caller-0" in error
        assert "caller-1" in error
        assert error.count("test_core_threads.py:") == 2
        assert sorted(t.tolist() for t in tensors) == [[1.0] * 3, [2.0] * 3]
        with pytest.raises(Desync, match="caller-0"):
            group.barrier()
        here.append(True)

    run_ranks(2, body, backend=backend)
    assert here


def _inside(thread, function):
    """Wait until a thread is in a function of the library."""
    while True:
        frame = sys._current_frames().get(thread.ident)
        if frame is not None and frame.f_code.co_name == function:
            return
        time.sleep(0)


def _begun(op):
    """Wait until this rank is inside a synchronous `op`."""
    while not any(r.op == op and r.end_ns == 0 for r in recorded()):
        time.sleep(0)


def _run(name, target):
    """Run `target` on a thread of that name; return its error, if it has raised one of ours."""
    errors = []

    def body():
        try:
            target()
        except (UsageError, Desync, PeerLost) as error:
            errors.append(error)

    thread = threading.Thread(target=body, name=name)
    thread.start()
    return thread, errors


@pytest.mark.needs("engine")
def test_thread_that_meets_the_one_that_was_refused_elsewhere_gets_no_sum():
    """Rank 0: "a" is inside, "b" is refused. Then "b" of rank 1 calls."""
    refused = threading.Event()

    def body(rank):
        group = dist.group.WORLD
        call = lambda: group.all_reduce(torch.full((3,), 10.0 + rank))  # noqa: E731
        if rank == 1:
            refused.wait(PATIENCE_S)
            thread, errors = _run("b", call)
            thread.join()
            return type(errors[0])
        first, errors = _run("a", call)
        _begun("all_reduce")
        second, lost = _run("b", call)
        second.join()
        assert isinstance(lost[0], UsageError)
        refused.set()
        first.join()
        return type(errors[0])

    assert run_ranks(2, body, backend="shm") == [Desync, Desync]


@pytest.mark.needs("engine")
def test_thread_is_inside_between_the_operations_of_a_coalesced_call():
    refused = threading.Event()

    def body(rank):
        group, t = dist.group.WORLD, torch.ones(3)
        if rank == 1:
            refused.wait(PATIENCE_S)
            group.all_reduce_coalesced([t])
            return
        first, errors = _run("a", lambda: group.all_reduce_coalesced([t]))
        _inside(first, "settle")
        second, lost = _run("b", lambda: group.all_reduce(torch.ones(3)))
        second.join()
        assert [type(e) for e in lost] == [UsageError]
        refused.set()
        first.join()
        assert not errors
        assert t.tolist() == [2.0] * 3

    run_ranks(2, body, backend="shm")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("async_op", [False, True])
def test_operations_of_other_threads_do_not_join_a_coalescing_manager(backend, async_op):
    here = threading.Barrier(2)

    def body(rank):
        group, t, other = dist.group.WORLD, torch.ones(3), torch.ones(3)
        refused = []

        def coalesce():
            with dist.coalescing_manager():
                dist.all_reduce(t)
                thread, errors = _run("other", lambda: group.all_reduce(other, async_op=async_op))
                thread.join()
                refused.extend(type(e) for e in errors)
                here.wait()
                dist.all_reduce(torch.ones(3))

        with pytest.raises((Aborted, Desync, PeerLost)):
            coalesce()
        assert refused == [UsageError]
        assert other.tolist() == [1.0] * 3
        assert group.coalesced is None

    run_ranks(2, body, backend=backend)


@pytest.mark.needs("engine")
def test_threads_of_other_names_whose_calls_have_an_order_are_right():
    """On rank 0 the second thread calls while the first one waits for what it has started."""
    second_called = threading.Event()

    def body(rank):
        group, tensors = dist.group.WORLD, [torch.ones(3), torch.full((3,), 5.0)]

        def call(t):
            work = group.all_reduce(t, async_op=True)
            if t is tensors[1]:
                second_called.set()
            work.wait()

        if rank == 1:
            second_called.wait(PATIENCE_S)
        first, errors = _run(f"first of rank {rank}", lambda: call(tensors[0]))
        if rank == 0:
            _inside(first, "settle")
        else:
            first.join()
        second, more = _run(f"second of rank {rank}", lambda: call(tensors[1]))
        first.join()
        second.join()
        return errors + more or [t.tolist() for t in tensors]

    assert run_ranks(2, body, backend="shm") == [[[2.0] * 3, [10.0] * 3]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_in_an_order_and_asynchronous_calls_are_not_refused(backend):
    """One thread after another, works waited for elsewhere, callbacks, and groups of their own."""

    def body(rank):
        group, other = dist.group.WORLD, dist.new_group()
        for _ in range(3):
            thread = threading.Thread(target=group.all_reduce, args=(torch.ones(3),))
            thread.start()
            thread.join()
        works = [group.all_reduce(torch.ones(3), async_op=True) for _ in range(4)]
        futures = [w.get_future().then(lambda f: f.wait()[0].sum().item()) for w in works]
        waiting = [threading.Thread(target=w.wait) for w in works]
        for thread in waiting:
            thread.start()
        group.barrier()
        for thread in waiting:
            thread.join()
        assert [f.wait() for f in futures] == [6.0] * 4
        beside = threading.Thread(
            target=lambda: [other.all_reduce(torch.ones(3)) for _ in range(50)]
        )
        beside.start()
        for _ in range(50):
            group.all_reduce(torch.ones(3))
        beside.join()

    run_ranks(2, body, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_of_other_threads_are_not_collected_by_a_coalescing_manager(backend):
    def body(rank):
        group, t = dist.group.WORLD, torch.ones(3)
        message = torch.full((3,), 7.0) if rank == 0 else torch.zeros(3)

        def other():
            for _ in range(2):  # into the same memory
                group.send(message, 1) if rank == 0 else group.recv(message, 0)

        with dist.coalescing_manager() as manager:
            group.all_reduce(t)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert len(manager.works) == 1
            assert message.tolist() == [7.0] * 3
        assert t.tolist() == [2.0] * 3

    run_ranks(2, body, backend=backend)
