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
from tests.waiting import PATIENCE_S

NEEDS_PEERS = True
FILE = Path(__file__).name


def _of_all(t, g):
    dist.all_reduce(t, group=g)


CALLS = {
    "other operation": (4, _of_all, lambda t, g: dist.broadcast(t, src=0, group=g)),
    "other count": (4, _of_all, lambda t, g: dist.all_reduce(t[:-1], group=g)),
    "other large count": (400_000, _of_all, lambda t, g: dist.all_reduce(t[:-1], group=g)),
    "other dtype": (4, _of_all, lambda t, g: dist.all_reduce(t.int(), group=g)),
    "other reduction": (4, _of_all, lambda t, g: dist.all_reduce(t, dist.ReduceOp.MAX, group=g)),
    "other root": (
        4,
        lambda t, g: dist.broadcast(t, src=0, group=g),
        lambda t, g: dist.broadcast(t, src=dist.get_world_size() - 1, group=g),
    ),
    "other parts of a list": (
        4,
        lambda t, g: dist.all_gather([t.clone() for _ in range(dist.get_world_size())], t, group=g),
        lambda t, g: dist.all_gather(
            [*(t.clone() for _ in range(dist.get_world_size() - 1)), t[:-1].clone()],
            t[:-1],
            group=g,
        ),
    ),
    "asynchronous": (
        4,
        lambda t, g: dist.all_reduce(t, group=g, async_op=True).wait(),
        lambda t, g: dist.barrier(group=g, async_op=True).wait(),
    ),
}
"""For each mismatch the elements, the call of all ranks but the last, and the last one's."""


def case_mismatches(rank, n):
    for what, (count, others, last) in CALLS.items():
        t = torch.full((count,), float(rank))
        group = dist.new_group()
        call = last if rank == n - 1 else others
        with pytest.raises(Desync) as info:
            call(t, group)
        assert set(info.value.calls) >= {0, n - 1}, what
        assert all(FILE in text for text in info.value.calls.values()), what
        assert info.value.rank == rank
        assert torch.equal(t, torch.full_like(t, float(rank))), f"{what}: data were touched"
        with pytest.raises(Desync):
            dist.barrier(group=group)
        dist.destroy_process_group(group)


def _impatient_group(limit_s: float):
    """Make a group that waits so long for its operations; its ranks had all the time to come."""
    group = dist.new_group()
    dist.barrier(group=group)
    group.set_timeout(timedelta(seconds=limit_s))
    return group


def case_late_ranks(rank, n):
    """The others do not call until rank 0 has given up: so it is known who is missing."""
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
    group = _impatient_group(0.3)
    if rank == 0:
        with pytest.raises(CommTimeout) as info:
            dist.recv(torch.zeros(4), src=1, group=group)
        assert info.value.missing == (1,)
    group.set_timeout(timedelta(seconds=PATIENCE_S))
    dist.barrier()
    if dist.get_backend() in ("threads", "shm", "mpi"):  # the group is whole
        t = torch.ones(1)
        dist.all_reduce(t, group=group)
        assert t.item() == n
    dist.destroy_process_group(group)


def case_rank_that_left(rank, n):
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


def case_message_of_a_rank_that_left(rank, n):
    """What was sent before is still received; after that nobody waits for it."""
    if dist.get_backend() not in ("threads", "shm", "mpi"):
        return  # others send when it is received
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
    if rank != 1:
        dist.destroy_process_group(group)
    dist.barrier()


def case_message_for_the_second_of_two_receives(rank, n):
    """The first has no room for it, and fails; both were there before the message."""
    if dist.get_backend() not in ("threads", "shm", "mpi"):
        return
    if rank == 0:
        room = torch.zeros(4), torch.zeros(3)
        first, second = (dist.irecv(t, src=1, tag=51) for t in room)
        dist.barrier()
        with pytest.raises(Desync):
            first.wait()
        second.wait()
        assert [t.tolist() for t in room] == [[0.0] * 4, [7.0] * 3]
        return
    dist.barrier()
    if rank == 1:
        dist.send(torch.full((3,), 7.0), dst=0, tag=51)


def case_message_that_does_not_fit(rank, n):
    """It is an error of its receiver alone."""
    if dist.get_backend() not in ("threads", "shm", "mpi"):
        return
    for sent, room in ((3, 4), (4, 3)):
        if rank == 1:
            dist.send(torch.ones(sent), dst=0, tag=50)
        if rank == 0:
            with pytest.raises(Desync):
                dist.recv(torch.ones(room), src=1, tag=50)
            received = torch.zeros(sent)
            dist.recv(received, src=1, tag=50)
            assert received.tolist() == [1.0] * sent


def case_the_world_lives_on(rank, n):
    t = torch.ones(3)
    dist.all_reduce(t)
    assert torch.equal(t, torch.full((3,), float(n)))
