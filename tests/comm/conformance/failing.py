"""Cases of what ranks find out together: mismatches, ranks that are late, ranks that left.

Each works in a group of its own, because a group that failed is not used again.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import dure as dist
from dure.errors import Aborted, CommError, CommTimeout, Desync, PeerLost, UsageError

FILE = Path(__file__).name


def _mismatch(rank: int, n: int, others, mine) -> None:
    """Let the last rank call `mine(group)` where all others call `others(group)`."""
    if n == 1:
        return
    group = dist.new_group()
    call = mine if rank == n - 1 else others
    with pytest.raises(Desync) as info:
        call(group)
    assert set(info.value.calls) >= {0, n - 1}
    assert all(FILE in text for text in info.value.calls.values())
    assert info.value.rank == rank
    with pytest.raises(Desync):
        dist.barrier(group=group)
    dist.destroy_process_group(group)


def case_other_operation(rank, n):
    t = torch.full((4,), float(rank))
    _mismatch(
        rank,
        n,
        lambda g: dist.all_reduce(t, group=g),
        lambda g: dist.broadcast(t, src=0, group=g),
    )
    assert torch.equal(t, torch.full((4,), float(rank))), "data were touched"


def case_other_count(rank, n):
    t = torch.full((4 if rank < n - 1 else 5,), float(rank))
    _mismatch(rank, n, lambda g: dist.all_reduce(t, group=g), lambda g: dist.all_reduce(t, group=g))
    assert torch.equal(t, torch.full_like(t, float(rank))), "data were touched"


def case_other_large_count(rank, n):
    t = torch.full((400_000 if rank < n - 1 else 400_001,), float(rank))
    _mismatch(rank, n, lambda g: dist.all_reduce(t, group=g), lambda g: dist.all_reduce(t, group=g))
    assert torch.equal(t, torch.full_like(t, float(rank))), "data were touched"


def case_other_dtype(rank, n):
    _mismatch(
        rank,
        n,
        lambda g: dist.all_reduce(torch.zeros(4), group=g),
        lambda g: dist.all_reduce(torch.zeros(4, dtype=torch.int32), group=g),
    )


def case_other_root(rank, n):
    _mismatch(
        rank,
        n,
        lambda g: dist.broadcast(torch.zeros(4), src=0, group=g),
        lambda g: dist.broadcast(torch.zeros(4), src=n - 1, group=g),
    )


def case_other_reduction(rank, n):
    _mismatch(
        rank,
        n,
        lambda g: dist.all_reduce(torch.zeros(4), dist.ReduceOp.SUM, group=g),
        lambda g: dist.all_reduce(torch.zeros(4), dist.ReduceOp.MAX, group=g),
    )


def case_mismatch_of_async_operations(rank, n):
    _mismatch(
        rank,
        n,
        lambda g: dist.all_reduce(torch.zeros(4), group=g, async_op=True).wait(),
        lambda g: dist.barrier(group=g, async_op=True).wait(),
    )


def _impatient_group(limit_s: float):
    """Make a group that waits so long for its operations; its ranks had all the time to come."""
    group = dist.new_group()
    dist.barrier(group=group)
    group.set_timeout(timedelta(seconds=limit_s))
    return group


def case_late_ranks(rank, n):
    """The others do not call until rank 0 has given up: so it is known who is missing."""
    if n == 1:
        return
    group = _impatient_group(0.3)
    if rank == 0:
        with pytest.raises(CommTimeout) as info:
            dist.all_reduce(torch.zeros(4), group=group)
        missing, others = info.value.missing, tuple(range(1, n))
        if dist.get_backend().startswith("hybrid"):  # of other hosts it knows one that is missing
            assert missing and set(missing) <= set(others)
        else:
            assert missing == others
        assert (info.value.elapsed_s or 0) >= 0.3
    dist.barrier()
    if rank > 0:
        with pytest.raises(CommError):
            dist.all_reduce(torch.zeros(4), group=group)
    dist.destroy_process_group(group)


def case_message_that_never_comes(rank, n):
    if n == 1:
        return
    group = _impatient_group(0.3)
    if rank == 0:
        with pytest.raises(CommTimeout):
            dist.recv(torch.zeros(4), src=1, group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def case_rank_that_left(rank, n):
    if n == 1:
        return
    group = dist.new_group()
    dist.barrier(group=group)
    if rank == n - 1:
        dist.destroy_process_group(group)
        with pytest.raises(UsageError):
            dist.barrier(group=group)
    else:
        with pytest.raises(PeerLost) as info:
            dist.all_reduce(torch.zeros(4), group=group)
        assert info.value.rank == rank
    dist.barrier()
    if rank != n - 1:
        dist.destroy_process_group(group)


def case_rank_that_leaves_at_once(rank, n):
    """Who leaves has ended an operation, in which others may still be: they end it well, too."""
    if n == 1:
        return
    operations = (
        lambda t, g: dist.barrier(group=g),
        lambda t, g: dist.all_reduce(t, group=g),
        lambda t, g: dist.broadcast(t, src=0, group=g),
        lambda t, g: dist.scatter(t, [t] * n if rank == 0 else None, src=0, group=g),
        lambda t, g: dist.gather(t, [t.clone() for _ in range(n)] if rank == 0 else None, 0, g),
    )
    for number, call in enumerate(operations):
        group = dist.new_group()
        call(torch.zeros(30_000), group)
        leaver = (0, n - 1)[number % 2]
        if rank != leaver:
            with pytest.raises(CommError):
                dist.barrier(group=group)
        dist.destroy_process_group(group)


def case_own_group_left_with_work_pending(rank, n):
    if n == 1:
        return
    group = dist.new_group()
    if rank == 0:
        work = dist.all_reduce(torch.zeros(4), group=group, async_op=True)
        dist.destroy_process_group(group)
        with pytest.raises(Aborted):
            work.wait()
        assert isinstance(work.exception(), Aborted)
    dist.barrier()
    if rank != 0:
        # What rank 0 had handed over before it left may be enough for one rank to succeed.
        with suppress(CommError):
            dist.all_reduce(torch.zeros(4), group=group)
        with pytest.raises(CommError):
            dist.barrier(group=group)
        dist.destroy_process_group(group)


def case_the_world_lives_on(rank, n):
    t = torch.ones(3)
    dist.all_reduce(t)
    assert torch.equal(t, torch.full((3,), float(n)))
