"""Runs that are killed, resumed, and killed again: the curve of losses must not change.

It is compared with that of an undisturbed run, bit for bit. Kills come at a random call that
writes, flushes or renames, so inside a save; in the drill half of them at any moment; of one rank
or of both.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.checkpoint.faults.resuming import BATCH, EPOCHS, SAMPLES, Kill, stint
from tests.comm.forked_ranks import Ranks

pytestmark = pytest.mark.needs("engine")

RANKS = 2
NUM_STEPS = EPOCHS * -(-SAMPLES // (RANKS * BATCH))


def _undisturbed(ranks: Ranks, folder: Path, sharded: bool) -> list[float]:
    curves = ranks.run(stint, RANKS, str(folder), sharded, Kill())
    assert curves[0] == curves[1]
    assert len(curves[0]) == len(set(curves[0])) == NUM_STEPS
    return curves[0]


def _killed(
    ranks: Ranks, folder: Path, sharded: bool, kills: list[Kill]
) -> tuple[list[float], int]:
    """Start the run again and again, the first times with a kill; count those that hit."""
    for hits, kill in enumerate([*kills, Kill()]):
        results = ranks.run(stint, RANKS, str(folder), sharded, kill)
        if all(isinstance(r, list) for r in results):
            assert results[0] == results[1]
            return results[0], hits
        assert any(r is None or isinstance(r, str) for r in results), results
    raise AssertionError("the run did not end although it was not killed")


@pytest.mark.parametrize(
    ("num_runs", "at_any_time"),
    [
        (4, False),
        pytest.param(200, True, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_runs_that_are_killed_resume_bit_for_bit(
    tmp_path: Path, num_runs: int, at_any_time: bool
) -> None:
    rng, num_hits = random.Random(num_runs), 0
    with Ranks(RANKS, tmp_path) as ranks:
        curve = _undisturbed(ranks, tmp_path / "whole", False)
        begin = time.monotonic()
        assert _undisturbed(ranks, tmp_path / "whole-sharded", True) == curve
        span_s = time.monotonic() - begin if at_any_time else None
        for run in range(num_runs):
            sharded, folder = run % 2 == 1, tmp_path / f"run{run}"
            kills = [Kill.random(rng, sharded, span_s) for _ in range(rng.randint(1, 3))]
            resumed, hits = _killed(ranks, folder, sharded, kills)
            assert resumed == curve, f"run {run}, kills {kills}"
            assert hits or at_any_time, "the first kill is at a call that every run makes"
            num_hits += hits
            left = [p.name for p in folder.iterdir() if p.name[0] != "."]
            assert 2 <= len(left) <= 3, left  # 3: killed after its last commit
    print(f"{num_runs} runs, {num_hits} kills, {NUM_STEPS} steps each: every curve as undisturbed")
