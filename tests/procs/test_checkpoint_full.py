"""A disk that is full for one real process: all ranks raise, and nothing is lost."""

from __future__ import annotations

import resource

import torch

from dure.checkpoint import Checkpointer
from dure.errors import CheckpointNotWritten


def _save(rank: int, folder: str, full: int, step: int) -> object:
    """Save with files limited to some 4 KB on rank `full`; return what the error says."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        Checkpointer(folder, sharded=True).save(
            step, a={"x": torch.ones(4000)}, b={"x": torch.ones(4000)}
        )
    except CheckpointNotWritten as error:
        return error.rank
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return None


def _load(rank: int, folder: str) -> int | None:
    return Checkpointer(folder).load(a={}, b={})


def test_full_disk_of_one_rank_fails_all_and_the_older_checkpoint_is_used(process_pool, tmp_path):
    pool, folder = process_pool(2), str(tmp_path)
    assert pool.run(_save, folder, -1, 1) == [None, None]
    for full in (0, 1):
        assert pool.run(_save, folder, full, 2) == [full, full]
        assert [p.name for p in tmp_path.iterdir()] == ["000001-step-1"]
        assert pool.run(_load, folder) == [1, 1]
