"""Survivors over hosts go on: a rank is killed, or a host loses its power, and `shrink` is called.

Two ranks on each of three hosts reduce; the store is rank 0's, on host a.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import dure as dist
from dure.errors import PeerLost
from tests.comm.forked_ranks import Slot
from tests.hosts.networks import hosts, set_variables, several_ranks_on
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.needs("network namespaces", "engine")

HOSTS, EACH = 3, 2
SLOW = pytest.mark.slow


def _sum_of_ranks(numel: int, group: dist.ProcessGroup | None = None) -> float:
    value = torch.full((numel,), float(dist.get_rank()))
    dist.all_reduce(value, group=group)
    assert (value == value[0]).all()
    return value[0].item()


def survive(slot: Slot, variables: dict[str, str], backend: str) -> dict[str, object]:
    """Reduce until a rank is lost, go on with the others, and say what was computed."""
    set_variables(slot.rank, variables)
    dist.init_process_group(backend, timeout=timedelta(seconds=PATIENCE_S))
    _sum_of_ranks(1000)
    Path(f"{slot.path}-{slot.rank}").write_text(str(os.getpid()))
    try:
        while True:
            _sum_of_ranks(100_000)
    except PeerLost as error:
        lost = error
    dist.shrink()
    n = dist.get_world_size()
    gathered = torch.empty(n)
    dist.all_gather_single(gathered, torch.tensor([float(slot.rank)]))
    sums = [_sum_of_ranks(1), _sum_of_ranks(300_000)]
    ends = dist.new_group([0, n - 1])  # one that a new group of survivors spans
    of_ends = _sum_of_ranks(1000, ends) if dist.get_rank() in (0, n - 1) else None
    dist.destroy_process_group()
    return {
        "lost": (type(lost), lost.peer),
        "left": gathered.tolist(),
        "sums": sums,
        "of_ends": of_ends,
    }


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        ("hybrid", "rank 3"),
        pytest.param("hybrid", "power", marks=SLOW),
        pytest.param("hybrid", "rank 2", marks=SLOW),  # its host's first one
        pytest.param("gloo", "rank 3", marks=SLOW),
    ],
)
def test_survivors_go_on(backend: str, fault: str, tmp_path: Path):
    with (
        hosts(HOSTS, "shrink") as made,
        several_ranks_on(made, EACH, tmp_path, {}, survive, backend) as ranks,
    ):
        until(lambda: len(list(tmp_path.glob("call1-*"))) == HOSTS * EACH, "ranks that reduce")
        if fault == "power":
            gone = {4, 5}
            made[-1].cut()  # none of its last words gets through
            made[-1].kill()
        else:
            gone = {int(fault.removeprefix("rank "))}
            os.kill(ranks.pids[min(gone)], signal.SIGKILL)
        left = [rank for rank in range(HOSTS * EACH) if rank not in gone]
        total = float(sum(range(len(left))))
        for rank in left:
            seen = ranks.result(rank)
            assert seen["left"] == left
            assert seen["sums"] == [total, total]
            if rank in (left[0], left[-1]):
                assert seen["of_ends"] == len(left) - 1
            kind, peer = seen["lost"]
            assert kind is PeerLost
            assert peer in gone or backend == "gloo", "Gloo says only that a connection was closed"
