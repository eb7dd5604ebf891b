"""A rank that goes when it has ended an operation leaves that operation whole for all others.

One rank is held up inside a barrier of several hosts until another has called the next operation,
has found out that a third one is gone, and has told so.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import dure as dist
from dure.errors import LaunchError, PeerLost
from dure.native import available as native_available
from dure.testing import ProcessPool

LIMIT_S = 60.0
NEWS_S = 0.3  # for what was told to arrive: where it does harm, it does so within some milliseconds

pytestmark = pytest.mark.skipif(
    not native_available()[0], reason=native_available()[1] or "no engine"
)


class _HeldUp:
    """The ranks of a host, whose next broadcast waits for a file and what comes after it."""

    def __init__(self, local, path: Path) -> None:
        self._local, self._path = local, path

    def __getattr__(self, name: str):
        return getattr(self._local, name)

    def run(self, call, async_op):
        if call.op != "broadcast":
            return self._local.run(call, async_op)
        until = time.monotonic() + LIMIT_S
        while not self._path.exists() and time.monotonic() < until:
            time.sleep(0.005)
        until = time.monotonic() + NEWS_S
        while time.monotonic() < until and self._local.group.failure() is None:
            time.sleep(0.005)
        return self._local.run(call, async_op)


def _hold_up(group, told: Path):
    comms = group._backends["cpu"]._comms
    comms.local = _HeldUp(comms.local, told)
    return comms


def _leave(rank: int, folder: str, held: int, leaver: int) -> None:
    group = dist.new_group()
    told = Path(folder, f"told-{group.group_name}")
    if rank == held:
        comms = _hold_up(group, told)
        dist.barrier(group=group)
        comms.local = comms.local._local
    else:
        dist.barrier(group=group)
    if rank == leaver:
        dist.destroy_process_group(group)
    else:
        with pytest.raises(PeerLost) as info:
            dist.all_reduce(torch.zeros(4), group=group)
        assert info.value.peer == leaver
        told.touch()
    dist.barrier()
    if rank != leaver:
        dist.destroy_process_group(group)


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(3, "hybrid", hosts="abb") as pool:
        yield pool


@pytest.mark.parametrize("leaver", [2, 1], ids=["a rank", "a leader"])
def test_operation_ends_well_though_a_rank_that_ended_it_leaves(pool, tmp_path, leaver):
    pool.run(_leave, str(tmp_path), 0, leaver)


def _end(rank: int, folder: str, held: int, leaver: int, destroys: bool) -> None:
    told = Path(folder, "told")
    group = dist.group.WORLD
    if rank == held:
        comms = _hold_up(group, told)
        dist.barrier()
        comms.local = comms.local._local
    else:
        dist.barrier()
    if rank == leaver:
        if destroys:
            dist.destroy_process_group()
        os._exit(0)
    with pytest.raises(PeerLost) as info:
        dist.all_reduce(torch.zeros(4))
    Path(folder, str(rank)).write_text(str(info.value.peer))
    told.touch()


@pytest.mark.parametrize("destroys", [True, False])
def test_operation_ends_well_though_the_process_of_a_rank_that_ended_it_ends(tmp_path, destroys):
    with ProcessPool(3, "hybrid", hosts="abb") as pool, pytest.raises(LaunchError):
        pool.run(_end, str(tmp_path), 0, 2, destroys)
    reports = {p.name: p.read_text() for p in tmp_path.iterdir() if p.name != "told"}
    assert reports == {"0": "2", "1": "2"}
