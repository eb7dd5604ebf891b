"""The end of the rank that serves the store, as other ranks see it over NCCL alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.backends.engine import store_holder
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[5]


@pytest.mark.needs("engine")
@pytest.mark.parametrize(("way", "seen"), [("leaves", "no loss"), ("is_killed", "PeerLost 0")])
def test_a_rank_that_served_the_store_is_lost_only_if_it_had_not_left(
    port: int, way: str, seen: str
):
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, store_holder.__file__, way],
            env=os.environ | job | {"RANK": str(r), "LOCAL_RANK": str(r), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    said = [rank.communicate(timeout=PATIENCE_S)[0].strip() for rank in ranks]
    assert (said[1], ranks[0].returncode) == (seen, 0)
