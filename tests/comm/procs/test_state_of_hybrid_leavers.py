"""A rank that goes when it has ended an operation leaves that operation whole for all others.

Rank 0, alone on its host, is held up inside a barrier until another rank has called the next
operation, has found out that a third one is gone, and has told so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import dure as dist
from dure.errors import LaunchError, PeerLost
from dure.testing import ProcessPool
from tests.waiting import until

pytestmark = pytest.mark.needs("engine")

NEWS_S = 0.3  # for what was told to arrive: where it does harm, it does so within some milliseconds


class _HeldUp:
    """The ranks of a host, whose next broadcast waits for a file and what comes after it."""

    def __init__(self, local, path: Path) -> None:
        self._local, self._path = local, path

    def __getattr__(self, name: str):
        return getattr(self._local, name)

    def run(self, call, async_op):
        if call.op == "broadcast":
            until(self._path.exists)
            end = time.monotonic() + NEWS_S
            while time.monotonic() < end and self._local.group.failure() is None:
                time.sleep(0.005)
        return self._local.run(call, async_op)


@contextmanager
def _held_up(group, told: Path) -> Iterator[None]:
    comms = group._backends["cpu"]._comms
    local, comms.local = comms.local, _HeldUp(comms.local, told)
    yield
    comms.local = local


def _leave(rank: int, folder: str, leaver: int, how: str) -> None:
    group = dist.new_group() if how == "the group" else dist.group.WORLD
    told = Path(folder, "told")
    if rank == 0:
        with _held_up(group, told):
            dist.barrier(group=group)
    else:
        dist.barrier(group=group)
    if rank == leaver:
        if how != "without a word":
            dist.destroy_process_group(group)
        if how != "the group":
            os._exit(0)
    else:
        with pytest.raises(PeerLost) as info:
            dist.all_reduce(torch.zeros(4), group=group)
        Path(folder, str(rank)).write_text(str(info.value.peer))
        told.touch()
    if how == "the group":
        dist.barrier()
        if rank != leaver:
            dist.destroy_process_group(group)


def reports(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != "told"}


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(3, "hybrid", hosts="abb") as pool:
        yield pool


@pytest.mark.parametrize("leaver", [2, 1], ids=["a rank", "a leader"])
def test_operation_ends_well_though_a_rank_that_ended_it_leaves(pool, tmp_path, leaver):
    pool.run(_leave, str(tmp_path), leaver, "the group")
    assert reports(tmp_path) == {str(rank): str(leaver) for rank in range(3) if rank != leaver}


@pytest.mark.parametrize("how", ["the job", "without a word"])
def test_operation_ends_well_though_the_process_of_a_rank_that_ended_it_ends(tmp_path, how):
    with ProcessPool(3, "hybrid", hosts="abb") as pool, pytest.raises(LaunchError):
        pool.run(_leave, str(tmp_path), 2, how)
    assert reports(tmp_path) == {"0": "2", "1": "2"}
