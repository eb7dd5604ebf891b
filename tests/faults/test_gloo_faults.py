"""Gloo as an engine: what survivors see when a rank is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import dure as dist
from dure.errors import LaunchError, PeerLost
from dure.testing import ProcessPool


def _lose_rank_one(rank: int, folder: str) -> None:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(4))
    except PeerLost as e:
        Path(folder, str(rank)).write_text(f"{e.rank} {time.monotonic() - began}")


def test_gloo_rank_killed_is_peer_lost_on_every_survivor_of_4(tmp_path):
    with ProcessPool(4, "gloo") as pool:
        with pytest.raises(LaunchError) as info:
            pool.run(_lose_rank_one, str(tmp_path))
        assert info.value.rank == 1
    reports = {p.name: p.read_text().split() for p in tmp_path.iterdir()}
    assert {name: r[0] for name, r in reports.items()} == {"0": "0", "2": "2", "3": "3"}
    assert all(float(r[1]) < 2 for r in reports.values()), "far below the timeout of 30 s"
