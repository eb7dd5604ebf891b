"""The symmetric heap with real processes: found by address in every group, and by rendezvous."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

import dure as dist
from dure import symmetric_memory
from dure.comm import functional
from dure.comm import memory as heap
from dure.errors import CommTimeout, PeerLost, ShapeError, UsageError
from tests.comm.forked_ranks import Ranks, Slot
from tests.waiting import until

pytestmark = pytest.mark.needs("engine")

_PROT_READ = 1


def neighbours(rank: int, n: int) -> list[list[float]]:
    """Each writes into its own tensor; the others read it, at whatever offset it lies."""
    history = [symmetric_memory.empty(1000 * (k + 1)) for k in range(rank + 1)]
    t = symmetric_memory.empty((2, 3), dtype=torch.float64)
    memory = symmetric_memory.rendezvous(t)
    assert (memory.rank, memory.world_size) == (rank, n)
    t.fill_(rank + 0.5)
    memory.barrier()
    seen = [memory.get_buffer(r, (2, 3), torch.float64) for r in range(n)]
    values = [x.unique().tolist() for x in seen]
    memory.barrier()
    seen[(rank + 1) % n][1, 2] = 100.0 + rank  # writing into a peer's memory
    memory.barrier()
    assert t[1, 2] == 100.0 + (rank - 1) % n
    assert memory.get_remote_tensor(rank, (6,), torch.float64).data_ptr() == t.data_ptr()
    memory.barrier()
    del history
    return values


def view_of_a_tensor(rank: int, n: int) -> float:
    """A view's storage is shared whole; the remote tensor begins where the view begins."""
    whole = symmetric_memory.empty(100)
    torch.arange(100, out=whole)
    memory = symmetric_memory.rendezvous(whole[10:20])
    memory.barrier()
    peer = (rank + 1) % n
    assert memory.get_buffer(peer, (100,), torch.float32)[99] == 99
    value = memory.get_remote_tensor(peer, (10,), torch.float32)[0].item()
    memory.barrier()
    return value


def signals(rank: int, n: int) -> list[float]:
    """Rank 0 produces, the last rank consumes: a signal each way for each of 50 steps."""
    t = symmetric_memory.empty(4)
    memory = symmetric_memory.rendezvous(t)
    got: list[float] = []
    last = n - 1
    for k in range(50):
        if rank == 0:
            memory.get_buffer(last, (4,), torch.float32).fill_(float(k))
            memory.put_signal(last, channel=3)
            memory.wait_signal(last, channel=3)
        elif rank == last:
            memory.wait_signal(0, channel=3)
            got.append(t.sum().item())
            memory.put_signal(0, channel=3)
    memory.barrier(channel=1)
    return got


def wrong_uses(rank: int, n: int) -> bool:
    memory = symmetric_memory.rendezvous(symmetric_memory.empty(8))
    with pytest.raises(ShapeError):
        memory.get_buffer(0, (2000,), torch.float32)
    with pytest.raises(UsageError):
        memory.get_buffer(n, (1,), torch.float32)
    with pytest.raises(UsageError):
        memory.put_signal(0, channel=16)
    with pytest.raises(UsageError):
        symmetric_memory.empty(3, device="meta")
    # One rank's mistake is told to all.
    mine = torch.empty(4) if rank == 1 else symmetric_memory.empty(4)
    with pytest.raises(UsageError, match="1"):
        symmetric_memory.rendezvous(mine)
    with pytest.raises(CommTimeout) as late:
        memory.wait_signal((rank + 1) % n, timeout_ms=30)
    assert late.value.missing == ((rank + 1) % n,)
    memory.barrier()
    return symmetric_memory.is_symm_mem_tensor(symmetric_memory.empty(4))


def segments_memory() -> int:
    """Return how many bytes of the groups' own segments this process has touched."""
    total, counts = 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if "-" in line.split(" ", 1)[0]:
                counts = "memfd:dure-group" in line
            elif counts and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def zero_copy_in_every_group(rank: int, n: int) -> list[int]:
    """A heap tensor is reduced where it lies in the world, a twin of it, and an axis of a mesh."""
    half = n // 2
    axes = [list(range(half)), list(range(half, n))]
    groups = [None, dist.new_group(list(range(n))), *(dist.new_group(axis) for axis in axes)]
    x = dist.shared_empty(1 << 20)
    grew = []
    for group, members in zip(groups, [list(range(n))] * 2 + axes, strict=True):
        if rank not in members:
            continue
        dist.barrier(group)
        before = segments_memory()
        x.fill_(rank + 1.0)
        dist.all_reduce(x, group=group)
        assert x.eq(sum(r + 1.0 for r in members)).all()
        parts = torch.empty(len(x) // len(members))
        x.fill_(1.0)
        dist.reduce_scatter_single(parts, x, group=group)
        assert parts.eq(float(len(members))).all()
        grew.append(segments_memory() - before)
        dist.barrier(group)
    return grew


def dies_while_it_is_waited_for(slot: Slot) -> int:
    slot.init()
    memory = symmetric_memory.rendezvous(symmetric_memory.empty(8))
    memory.barrier()
    last = slot.size - 1
    if slot.rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as lost:
        memory.wait_signal(last)
    assert lost.value.pid is not None
    assert lost.value.peer is not None
    return lost.value.peer


def written_after_it_failed(slot: Slot) -> bool:
    """What rank 2 writes into rank 1's tensor after a collective of it failed does not reach it.

    Rank 0 dies while it writes its slice: all have arrived, so peers may be writing, too.
    Rank 1 uses its tensor again; rank 2, kept from its core until then, say, writes into it.
    """
    slot.init()
    count = 300_000
    x = dist.shared_empty(count)
    x.fill_(1.0)
    memory = symmetric_memory.rendezvous(x)
    buffer = memory.get_buffer(1, (count,), torch.float32)
    if slot.rank == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(x.data_ptr()), 4096, _PROT_READ) == 0
    memory.barrier()
    with pytest.raises(PeerLost) as lost:
        dist.all_reduce(x)
    assert lost.value.peer == 0
    used, written = Path(f"{slot.path}-used"), Path(f"{slot.path}-written")
    if slot.rank == 2:
        until(used.exists)
        buffer.fill_(9.0)
        written.touch()
        return True
    x.fill_(7.0)
    used.touch()
    until(written.exists)
    return bool(x.eq(7.0).all())


def functional_results(rank: int, n: int) -> list[bool]:
    """Which results of functional collectives lie in the heap; all may be changed in place."""
    large = torch.ones(1 << 18, requires_grad=True)  # 1 MiB
    results = [
        functional.all_reduce(large, "sum"),
        functional.all_gather_tensor(large, 0),
        functional.reduce_scatter_tensor(large, "sum", 0),
        functional.all_reduce(torch.ones(1 << 17), "sum"),
    ]
    for result in results:
        result.add_(1)
    assert results[0][0] == n + 1
    results[0].sum().backward()
    assert large.grad is not None
    assert large.grad[0] == n
    return [heap.heap_address(result) is not None for result in results]


# In the order of the pools, of which one is kept at a time.


def test_a_view_begins_where_it_began_2_ranks(process_pool):
    assert process_pool(2, "shm").run(view_of_a_tensor, 2) == [10.0, 10.0]


def test_wrong_uses_are_told_2_ranks(process_pool):
    assert process_pool(2, "shm").run(wrong_uses, 2) == [True, True]


@pytest.mark.parametrize(("backend", "large"), [("shm", True), ("gloo", False)])
def test_large_functional_results_lie_in_the_heap_where_ranks_share_memory_2_ranks(
    backend, large, process_pool
):
    wanted = [large, large, False, False]  # the part of a reduce_scatter is 512 KiB
    assert process_pool(2, backend).run(functional_results, 2) == [wanted] * 2


@pytest.mark.parametrize(("n", "backend"), [(2, "gloo"), (3, "shm")])
def test_a_peers_tensor_is_read_and_written(n, backend, process_pool):
    wanted = [[r + 0.5] for r in range(n)]
    assert process_pool(n, backend).run(neighbours, n) == [wanted] * n


def test_signals_order_writes_and_reads_3_ranks(process_pool):
    got = process_pool(3, "shm").run(signals, 3)
    assert got[-1] == [4.0 * k for k in range(50)]


def test_zero_copy_in_every_group_4_ranks(process_pool):
    for grew in process_pool(4, "shm").run(zero_copy_in_every_group, 4):
        assert len(grew) == 3  # the world, its twin, its axis
        # Staging would touch the 512 KiB buffers of all members; headers take a few pages.
        assert max(grew) < 256 * 1024


def test_a_rank_that_dies_is_not_waited_for_3_ranks(tmp_path):
    with Ranks(3, tmp_path, dies_while_it_is_waited_for) as ranks:
        assert [r for r in ranks.values() if isinstance(r, int)] == [2, 2]


def test_a_late_write_does_not_reach_a_tensor_used_again_3_ranks(tmp_path):
    with Ranks(3, tmp_path, written_after_it_failed) as ranks:
        assert ranks.values() == [None, True, True]
