"""Runs that are killed at a random moment, resumed, and killed again: the curve must not change.

The curve of losses of a killed run is compared with that of an undisturbed one, bit for bit. Half
of the kills come at a random time, half at a random call that writes, flushes or renames, so inside
a save; of one rank or of both.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from dure.native import available
from faults.crew import Crew
from faults.resuming import BATCH, EPOCHS, SAMPLES, Kill, stint

pytestmark = [
    pytest.mark.skipif(not available()[0], reason=available()[1] or "-"),
    pytest.mark.timeout(3600),
]

RANKS, LIMIT_S = 2, 60.0
NUM_STEPS = EPOCHS * -(-SAMPLES // (RANKS * BATCH))


def _undisturbed(crew: Crew, folder: Path, sharded: bool) -> tuple[list[float], float]:
    begin = time.monotonic()
    curves = crew.run(stint, RANKS, str(folder), sharded, Kill(), limit_s=LIMIT_S)
    assert curves[0] == curves[1]
    assert len(curves[0]) == NUM_STEPS
    assert len(set(curves[0])) == NUM_STEPS
    return curves[0], time.monotonic() - begin


def _killed(crew: Crew, folder: Path, sharded: bool, kills: list[Kill]) -> tuple[list[float], int]:
    """Start the run again and again, the first times with a kill; count those that hit."""
    for hits, kill in enumerate([*kills, Kill()]):
        results = crew.run(stint, RANKS, str(folder), sharded, kill, limit_s=LIMIT_S)
        if all(isinstance(r, list) for r in results):
            assert results[0] == results[1]
            return results[0], hits
        assert any(r is None or isinstance(r, str) for r in results), results
    raise AssertionError("the run did not end although it was not killed")


def _drill(tmp_path: Path, num_runs: int, seed: int) -> None:
    rng, hits = random.Random(seed), 0
    with Crew(RANKS, tmp_path) as crew:
        curve, _ = _undisturbed(crew, tmp_path / "whole", False)
        again, span_s = _undisturbed(crew, tmp_path / "whole-sharded", True)
        assert again == curve
        for run in range(num_runs):
            sharded = run % 2 == 1
            kills = [Kill.random(rng, span_s, sharded) for _ in range(rng.randint(1, 3))]
            resumed, hit = _killed(crew, tmp_path / f"run{run}", sharded, kills)
            assert resumed == curve, f"run {run} of seed {seed}, kills {kills}"
            hits += hit
            left = [p.name for p in (tmp_path / f"run{run}").iterdir() if p.name[0] != "."]
            assert 2 <= len(left) <= 3, left  # 3: killed after its last commit
            if run % 20 == 19:
                print(f"{run + 1} runs, {hits} kills", flush=True)
    print(f"{num_runs} runs, {hits} kills, {len(curve)} steps each: every curve as undisturbed")
    assert hits > num_runs // 2


def test_runs_killed_at_a_random_moment_resume_bit_for_bit(tmp_path: Path) -> None:
    _drill(tmp_path, 5, seed=4)


@pytest.mark.slow
def test_two_hundred_runs_killed_at_a_random_moment_resume_bit_for_bit(tmp_path: Path) -> None:
    _drill(tmp_path, 200, seed=20)
