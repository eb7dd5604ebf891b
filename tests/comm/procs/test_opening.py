"""Making and unmaking a group of the shm backend: refusals, late ranks, and nothing left behind."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest
import torch

from dure.comm.ops import ReduceOp
from dure.errors import RendezvousError
from dure.store.file import FileStore
from dure.store.prefix import PrefixStore
from tests.comm.forked_ranks import Ranks, Slot, join, mapped_segments
from tests.waiting import descriptors

pytestmark = pytest.mark.needs("engine")


class _Misled(FileStore):
    """Tells of a segment that is not there."""

    def get(self, key: str) -> bytes:
        value = super().get(key)
        return b"%d:0:1" % os.getpid() if key == "shm/segment" else value


def _cannot_map(slot: Slot):
    try:
        join(slot, _Misled(slot.path, -1) if slot.rank == 1 else None)
    except RendezvousError as error:
        return error
    return None


def test_rank_that_cannot_map_is_refused_on_all_of_3_ranks(tmp_path):
    with Ranks(3, tmp_path, _cannot_map) as ranks:
        for rank in range(3):
            error = ranks.result(rank)
            assert type(error) is RendezvousError
            assert "rank 1" in error.seen


def _opens_and_closes(slot: Slot, rounds: int):
    store = FileStore(slot.path, -1)
    seen = []
    for k in range(rounds):
        backend = join(slot, PrefixStore(str(k), store))
        x = torch.ones(200_000)
        request = backend.all_reduce(x, ReduceOp.SUM, True)
        assert request is not None
        request.wait()
        shared = backend.allocate(1 << 20, False).view(torch.float32)
        shared.fill_(1)
        backend.all_reduce(shared, ReduceOp.SUM, False)
        backend.send(x[:1].clone(), slot.rank, 0, False)
        backend.recv(x[:1], slot.rank, 0, True).wait()
        backend.close(False)
        assert shared[-1] == slot.size  # memory lives as long as its tensor
        del shared
        threads = len(os.listdir("/proc/self/task"))
        seen.append((len(descriptors()), len(mapped_segments()), threads))
    return seen


def test_groups_that_come_and_go_leave_nothing_on_2_ranks(tmp_path):
    with Ranks(2, tmp_path, _opens_and_closes, 10) as ranks:
        for seen in ranks.values():
            assert isinstance(seen, list)
            assert {mappings for _, mappings, _ in seen} == {1}  # the process's own heap
            assert len({(files, threads) for files, _, threads in seen[2:]}) == 1


def _is_idle(slot: Slot):
    backend = join(slot)
    x = torch.ones(1000)
    request = backend.all_reduce(x, ReduceOp.SUM, True)
    assert request is not None
    request.wait()
    backend.recv(x[:1], slot.rank, 0, True)
    backend.send(x[:1].clone(), slot.rank, 0, False)
    backend.barrier(False)
    used = _switches()
    time.sleep(0.25)  # what is measured: many slices of a thread that waits
    used = _switches() - used
    backend.barrier(False)
    backend.close(False)
    return used


def _switches() -> int:
    """Count how often the process's threads went to sleep."""
    total = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as status:
            total += sum(int(line.split()[1]) for line in status if line.startswith("voluntary"))
    return total


def test_idle_group_of_2_ranks_uses_no_processor(tmp_path):
    with Ranks(2, tmp_path, _is_idle) as ranks:
        for switches in ranks.values():
            assert isinstance(switches, int)
            assert switches < 12  # a thread that polled would have 60


def _joins_under(slot: Slot, what: int, limit: int) -> object:
    """Limit this process to `limit` bytes more than it uses, and join."""
    page = resource.getpagesize()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * page
    more = used if what == resource.RLIMIT_AS else 0
    resource.setrlimit(what, (more + limit, resource.RLIM_INFINITY))
    try:
        backend = join(slot)
    except RendezvousError as error:
        return error.seen, error.fix
    x = torch.ones(1 << 18)
    shared = backend.allocate(1 << 20, False).view(torch.float32)
    shared.fill_(1)
    for tensor in (x, shared):
        backend.all_reduce(tensor, ReduceOp.SUM, False)
    backend.close(False)
    return x[-1].item(), shared[-1].item()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("what", "limit"),
    [
        (resource.RLIMIT_AS, 1 << 30),  # the heap of one rank alone would take it
        (resource.RLIMIT_FSIZE, 64 << 20),
    ],
)
def test_a_limit_makes_heaps_smaller(tmp_path, size, what, limit):
    with Ranks(size, tmp_path, _joins_under, what, limit) as ranks:
        assert ranks.values() == [(size, size)] * size
