"""Threads that call collectives of one group at the same time: the second one is refused.

Then the group ends on all ranks, because nothing that follows is known to match.
"""

import threading

import pytest
import torch

import dure as dist
from dure.errors import Aborted, Desync, PeerLost, UsageError
from dure.testing import run_ranks
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
