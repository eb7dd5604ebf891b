"""Cases of what only the mpi backend has; see `mpi_suite`, which runs them."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch

import dure as dist
from dure.comm.backends.mpi import backend as mpi
from dure.comm.backends.mpi import memory as mpi_memory
from dure.comm.backends.mpi.header import HEADER, INLINE
from dure.comm.backends.mpi.library import load
from dure.comm.world import current_world
from dure.errors import CommTimeout, Desync, PeerLost, UsageError
from tests.waiting import PATIENCE_S


def holds(tensor: torch.Tensor, value: float) -> bool:
    """Tell whether every element of a tensor is `value`."""
    return torch.equal(tensor, torch.full_like(tensor, value))


def _ring(rank: int, n: int) -> tuple[int, int]:
    return (rank + 1) % n, (rank - 1) % n


def case_sizes_around_every_border(rank, n):
    """Inline, one exchange, segments: a byte less and more than each."""
    for border in (INLINE, HEADER, mpi._FEW, mpi._SEGMENT, n * mpi._SEGMENT):
        for size in (border - 1, border, border + 1):
            t = torch.full((size,), rank + 1, dtype=torch.uint8)
            dist.all_reduce(t)
            assert holds(t, n * (n + 1) // 2), size
            dist.broadcast(t.fill_(rank + 1), src=n - 1)
            assert holds(t, n), size
            output = torch.empty(n * size, dtype=torch.uint8)
            dist.all_gather_single(output, t.fill_(rank))
            assert all(holds(part, r) for r, part in enumerate(output.view(n, size))), size


def _arrived(source: int, tag: int) -> int:
    """Wait for a message, and return its length; it is not received."""
    from mpi4py import MPI

    status, pg = MPI.Status(), current_world().need_default()
    library, comm = load(), pg._first._comm  # pyright: ignore
    while True:
        with library.lock:
            if comm.Iprobe(source, tag, status):
                return status.Get_elements(MPI.BYTE)


def case_long_messages_reach_receives_that_wait_at_the_same_time(rank, n):
    if n == 1:
        return
    longest, mpi_memory._LONGEST = mpi_memory._LONGEST, 100_000
    try:
        right, left = _ring(rank, n)
        got = torch.empty(200_001)
        sent = dist.isend(torch.full((200_001,), float(rank)), dst=right, tag=3)
        assert _arrived(left, tag=3) == got.nbytes  # in one message, which one receive takes
        assert dist.recv(got, tag=3) == left
        sent.wait()
        assert holds(got, left)
        for length in (200_001, *[1] * 100):
            taken = [torch.empty(length) for _ in range(4)]
            works = [dist.irecv(t, src=left, tag=4) for t in taken]
            dist.barrier()  # on every rank all receives wait
            for i in range(4):
                works.append(dist.isend(torch.full((length,), 10.0 * rank + i), right, tag=4))
            for work in works:
                work.wait()
            assert all(holds(t, 10 * left + i) for i, t in enumerate(taken)), length
        t = torch.full((100_001,), float(rank + 1))
        dist.all_reduce(t)
        assert holds(t, n * (n + 1) / 2)
    finally:
        mpi_memory._LONGEST = longest


def case_asynchronous_work_goes_on_while_nobody_waits(rank, n):
    """Rank 0 only waits in the store, while the others need its part of several exchanges."""
    t = torch.full((n * mpi._SEGMENT,), float(rank + 1))
    work = dist.all_reduce(t, async_op=True)
    store = current_world().need_default().store
    if rank:
        work.wait()
        store.set(f"mpi/saw/{rank}", "1")
    else:
        store.wait([f"mpi/saw/{r}" for r in range(1, n)], timedelta(seconds=PATIENCE_S))
        work.wait()
    assert holds(t, n * (n + 1) / 2)
    dist.barrier()


def case_tag_that_mpi_does_not_have(rank, n):
    if n > 1:
        with pytest.raises(UsageError):
            dist.send(torch.ones(1), dst=_ring(rank, n)[0], tag=2**31 - 1)


def _press_ctrl_c(inside: threading.Event) -> None:
    inside.wait()
    time.sleep(0.1)  # a moment earlier or later it is the same
    os.kill(os.getpid(), signal.SIGINT)


def case_wait_that_is_interrupted(rank, n):
    """Ctrl-C ends a wait; the group can be left, and peers hear of it."""
    if n == 1:
        return
    group = dist.new_group()
    if rank == 0:
        inside = threading.Event()
        pressed = threading.Thread(target=_press_ctrl_c, args=(inside,))
        pressed.start()

        def wait_in_vain() -> None:
            inside.set()
            dist.all_reduce(torch.ones(1), group=group)

        with pytest.raises(KeyboardInterrupt):
            wait_in_vain()
        pressed.join()
        dist.destroy_process_group(group)
    dist.barrier()
    if rank:
        with pytest.raises(PeerLost) as info:
            dist.barrier(group=group)
        assert info.value.peer == 0
        dist.destroy_process_group(group)


def case_mpis_own_collectives_where_calls_are_not_compared(rank, n):
    group = dist.new_group(pg_options={"verify": False})
    sums, products = n * (n + 1) // 2, {1: 1, 2: 2, 3: 6, 4: 24}
    for size in (1, 4_096, 4_097, 16_384, 16_385, 1 << 20, (1 << 20) + 1):  # of 4 bytes
        for dtype in (torch.float32, torch.int32, torch.bfloat16):
            t = torch.full((size,), rank + 1, dtype=dtype)
            dist.all_reduce(t, group=group)
            assert holds(t, sums), (size, dtype)
            dist.all_reduce(t.fill_(rank + 1), dist.ReduceOp.MAX, group=group)
            assert holds(t, n), (size, dtype)
            dist.reduce(t.fill_(rank + 1), 0, dist.ReduceOp.PRODUCT, group=group)
            assert holds(t, products[n] if rank == 0 else rank + 1), (size, dtype)
            dist.broadcast(t.fill_(rank + 1), src=n - 1, group=group)
            assert holds(t, n), (size, dtype)
    nan = torch.tensor([float("nan") if rank == 0 else 1.0])
    dist.all_reduce(nan, dist.ReduceOp.MAX, group=group)
    assert nan.isnan().item()
    dist.destroy_process_group(group)


def case_mpis_own_collective_that_a_rank_does_not_call(rank, n):
    if n == 1:
        return
    group = dist.new_group(pg_options={"verify": False})
    group.set_timeout(timedelta(seconds=0.3))
    if rank == 0:
        with pytest.raises(CommTimeout) as info:
            dist.all_reduce(torch.ones(100), group=group)
        assert info.value.missing == ()
        assert "does not compare calls" in info.value.seen
    dist.barrier()
    if rank:
        with pytest.raises(CommTimeout):
            dist.all_reduce(torch.ones(100), group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def case_an_error_of_mpi_is_an_exception(rank, n):
    """By default MPI ends the job."""
    from mpi4py import MPI

    with pytest.raises(MPI.Exception):
        MPI.COMM_WORLD.Isend(bytearray(1), dest=n + 1)


def case_ranks_that_do_not_agree_to_compare_calls(rank, n):
    if n > 1:
        with pytest.raises(Desync, match="verify=False"):
            dist.new_group(pg_options={"verify": rank > 0})
