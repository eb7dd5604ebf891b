"""Cases of what only the mpi backend has; see `mpi_suite`, which runs them."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch

import dure as dist
from dure.comm.backends.mpi import backend as mpi
from dure.comm.backends.mpi import memory as mpi_memory
from dure.comm.backends.mpi.header import HEADER, INLINE
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


def case_reductions_in_segments(rank, n):
    count = 5 * mpi._SEGMENT // 8 + 3
    given = torch.arange(count, dtype=torch.float64) % 1000 + rank
    wanted = (torch.arange(count, dtype=torch.float64) % 1000) * n + n * (n - 1) // 2
    kept = given.clone()
    dist.reduce(kept, dst=n - 1)
    assert torch.equal(kept, wanted if rank == n - 1 else given)
    parts = [given + r for r in range(n)]
    dist.reduce_scatter(kept, parts)
    assert torch.equal(kept, wanted + n * rank)


def case_long_messages_travel_in_parts(rank, n):
    if n == 1:
        return
    longest, mpi_memory._LONGEST = mpi_memory._LONGEST, 1000
    try:
        right, left = _ring(rank, n)
        got = torch.empty(5_001)
        sent = dist.isend(torch.full((5_001,), float(rank)), dst=right, tag=3)
        assert dist.recv(got, tag=3) == left
        sent.wait()
        assert holds(got, left)
        t = torch.full((100_001,), float(rank + 1))
        dist.all_reduce(t)
        assert holds(t, n * (n + 1) / 2)
    finally:
        mpi_memory._LONGEST = longest


def case_reductions_without_the_native_kernels(rank, n):
    native, mpi_memory._NATIVE = mpi_memory._NATIVE, False
    try:
        for dtype, count in itertools.product((torch.bfloat16, torch.uint16), (5, 200_003)):
            t = torch.full((count,), rank + 1).to(dtype)
            dist.all_reduce(t)
            assert torch.equal(t, torch.full((count,), n * (n + 1) // 2).to(dtype))
    finally:
        mpi_memory._NATIVE = native


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


def case_message_that_does_not_fit(rank, n):
    for sent, room in ((3, 4), (4, 3)):
        if rank == 1:
            dist.send(torch.ones(sent), dst=0, tag=50)
        if rank == 0 and n > 1:
            with pytest.raises(Desync):
                dist.recv(torch.ones(room), src=1, tag=50)
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == n


def case_lengths_that_only_two_ranks_could_compare(rank, n):
    """Rank 1 sends rank 0 less than it expects; all ranks hear of it."""
    if n == 1:
        return
    group = dist.new_group()
    inputs = [torch.ones(3 if (rank, r) == (1, 0) else 400) for r in range(n)]
    with suppress(Desync):  # a rank whose own lengths are right may be done before it hears
        dist.all_to_all([torch.ones(400) for _ in range(n)], inputs, group=group)
    with pytest.raises(Desync):
        dist.barrier(group=group)
    dist.destroy_process_group(group)


def case_mismatch_names_each_ranks_line(rank, n):
    if n == 1:
        return
    group = dist.new_group()
    t = torch.ones(7, dtype=torch.float16)
    with pytest.raises(Desync) as info:
        dist.barrier(group=group) if rank else dist.all_reduce(t, group=group)
    calls = info.value.calls
    assert set(calls) == set(range(n))
    assert all("mpi_cases.py:" in text for text in calls.values())
    assert "all_reduce(float16[7], SUM) at" in calls[0]
    dist.destroy_process_group(group)


def case_message_of_a_rank_that_left(rank, n):
    """What was sent before is still received; after that nobody waits for it."""
    if n == 1:
        return
    group = dist.new_group()
    if rank == 1:
        dist.send(torch.full((2,), 5.0), dst=0, tag=1, group=group)
        dist.destroy_process_group(group)
    dist.barrier()
    if rank == 0:
        got = torch.empty(2)
        dist.recv(got, src=1, tag=1, group=group)
        assert got.tolist() == [5.0, 5.0]
        with pytest.raises(PeerLost) as info:
            dist.recv(got, src=1, tag=1, group=group)
        assert info.value.peer == 1
        with pytest.raises(PeerLost):
            dist.send(got, dst=1, group=group)
    if rank != 1:
        dist.destroy_process_group(group)
    dist.barrier()


def case_receive_that_timed_out_leaves_the_group_whole(rank, n):
    if n == 1:
        return
    group = dist.new_group()
    group.set_timeout(timedelta(seconds=0.3))
    if rank == 0:
        with pytest.raises(CommTimeout) as info:
            dist.recv(torch.zeros(4), src=1, tag=5, group=group)
        assert info.value.missing == (1,)
    dist.barrier()
    t = torch.ones(1)
    dist.all_reduce(t, group=group)
    assert t.item() == n
    dist.destroy_process_group(group)


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


def case_groups_come_and_go(rank, n):
    """Each is left while its neighbours are used: none takes another's messages."""
    for i in range(20):
        group = dist.new_group()
        t = torch.full((3,), float(rank + i))
        dist.all_reduce(t, group=group)
        assert holds(t, n * i + n * (n - 1) / 2)
        dist.destroy_process_group(group)


def case_groups_of_some_ranks(rank, n):
    for members in ([0], list(range(n)), list(range(0, n, 2))):
        group = dist.new_group(members)
        if rank in members:
            t = torch.full((100_000,), float(rank + 1))
            dist.all_reduce(t, group=group)
            assert holds(t, sum(members) + len(members))
            dist.destroy_process_group(group)


def case_pipelines_train_as_one_process(rank, n):
    """Also when shapes differ, and behind steps in which a stage has raised."""
    if n == 1:
        return
    # lazy: a second of imports, which a world of one does not need
    from tests.parallel.pipeline.ranks.pipeline_models import Pipeline, batches, dense, one_process
    from tests.parallel.pipeline.ranks.test_failures import fail_everywhere

    for name in ("interleaved", "zb-v"):
        parts = dense(2 * n, width=200)
        data = batches(2, rows=202, width=200)
        pipeline = Pipeline(name, rank, n, parts, 6)
        for x, y in data:
            pipeline.eval(x)
            pipeline.step(x, y)
        _, expected = one_process(parts, data, 6)
        for key, weight in pipeline.weights().items():
            torch.testing.assert_close(weight, expected[key], rtol=0, atol=1e-12)
    parts = dense(n)
    _, weights = fail_everywhere(rank, "1f1b", n, parts)
    _, expected = one_process(parts, batches(2), 4)
    for key, weight in weights.items():
        torch.testing.assert_close(weight, expected[key], rtol=0, atol=1e-12)
