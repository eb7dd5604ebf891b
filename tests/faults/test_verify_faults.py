"""Verification: a rank that is killed between two collectives."""

from __future__ import annotations

import pytest

from dure.errors import LaunchError
from dure.testing import ProcessPool
from procs import verify_ranks


def test_a_rank_of_3_killed_before_a_round_is_peer_lost_on_the_others(tmp_path):
    with ProcessPool(3, "gloo") as pool, pytest.raises(LaunchError):
        pool.run(verify_ranks.lose_rank_1, str(tmp_path))
    told = {p.name: p.read_text().split() for p in tmp_path.iterdir()}
    assert {rank: words[:4] for rank, words in told.items()} == {
        rank: ["1", "all_reduce", "2", rank] for rank in ("0", "2")
    }
    assert all(float(words[4]) < 5 for words in told.values()), "far below the timeout of 30 s"
