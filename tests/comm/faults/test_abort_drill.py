"""Thousands of rounds in each of which one rank is killed at a random moment of its collectives.

Every survivor must raise `PeerLost` that names the victim, soon, and leave nothing behind; in every
fourth round the survivors then form a group of their own and must reduce right.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import dure
from dure import symmetric_memory
from dure.errors import PeerLost
from tests.comm.forked_ranks import Ranks, Slot, mapped_segments
from tests.waiting import PATIENCE_S, descriptors

pytestmark = [
    pytest.mark.needs("engine"),
    pytest.mark.timeout(3600),
]

COUNTS = (1, 7, 1000, 40_000, 300_000)


OPERATIONS = ("reduce", "broadcast", "gather", "scatter", "exchange", "barrier", "pass around")


def _operate(operation: str, rng: random.Random, x: torch.Tensor) -> None:
    n, rank = dure.get_world_size(), dure.get_rank()
    work = None
    match operation:
        case "reduce":
            work = dure.all_reduce(x, async_op=rng.random() < 0.3)
        case "broadcast":
            dure.broadcast(x, rng.randrange(n))
        case "gather":
            dure.all_gather_single(torch.empty(n * x.numel()), x)
        case "scatter":
            dure.reduce_scatter_single(x, torch.ones(n * x.numel()))
        case "exchange":
            dure.all_to_all_single(torch.empty(n * x.numel()), torch.ones(n * x.numel()))
        case "barrier":
            dure.barrier()
        case _:
            work = dure.isend(x, (rank + 1) % n)
            dure.recv(torch.empty_like(x), (rank - 1) % n)
    if work is not None:
        work.wait()


def _round(slot: Slot, seed: int, victim: int, after_s: float, shrinks: bool):
    """Collectives at random, alike on all ranks, until one of them is lost."""
    symmetric_memory.empty(1)  # the process's heap, which stays
    before = len(descriptors()), len(mapped_segments()), _num_threads()
    slot.init()
    rng = random.Random(seed)
    dure.barrier()  # all have joined
    if slot.rank == victim:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process wherever it is
        signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        while True:
            operation, count = rng.choice(OPERATIONS), rng.choice(COUNTS)
            _operate(operation, rng, torch.ones(count))
    except PeerLost as error:
        lost, at = error, time.monotonic()
    total = None
    if shrinks:
        dure.shrink()
        x = torch.ones(1000)
        dure.all_reduce(x)
        total = x.sum().item() / 1000
    dure.destroy_process_group()
    after = len(descriptors()), len(mapped_segments()), _num_threads()
    return lost.peer, lost.exit, at, total, before, after


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _drill(folder: Path, num_rounds: int, seed: int) -> None:
    rng, slowest = random.Random(seed), -PATIENCE_S
    with Ranks(4, folder) as ranks:
        for number in range(num_rounds):
            size = rng.choice((3, 4))
            victim, after_s = rng.randrange(size), rng.uniform(1e-5, 0.03)
            shrinks = number % 4 == 0
            replies = ranks.run(_round, size, rng.random(), victim, after_s, shrinks)
            where = f"round {number}, seed {seed}: {replies}"
            for rank, reply in enumerate(replies):
                if rank == victim:
                    assert reply is None, where
                    continue
                peer, exit_, at, total, before, after = reply
                took = at - ranks.ended_at[victim]  # negative where we saw the end later
                assert peer == victim, where
                assert exit_ in (None, "signal 14 (SIGALRM)"), where
                assert took < PATIENCE_S / 2, where
                assert total == (size - 1 if shrinks else None), where
                assert after == before, where
                slowest = max(slowest, took)
        assert ranks.num_started == 4 + num_rounds
        pids = ranks.pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    print(f"{num_rounds} rounds; the slowest survivor raised {slowest * 1000:.0f} ms after the end")


def test_killed_at_random_moments_some_rounds(tmp_path):
    _drill(tmp_path, 10, 1)


@pytest.mark.slow
def test_killed_at_random_moments_two_thousand_rounds(tmp_path):
    _drill(tmp_path, 2000, random.SystemRandom().randrange(1 << 30))
