"""Jobs that are saved, killed, moved and sent back at random: they end as an undisturbed one does.

Histories are drawn from a seed (`histories`), which the note of a failure names.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.faults.histories import (
    MOST_RANKS,
    NUM_STEPS,
    PER_EPOCH,
    RUNS,
    SAMPLES,
    STORES,
    History,
    Kind,
    Stint,
    drawn,
    live,
)
from tests.comm.forked_ranks import Ranks

pytestmark = pytest.mark.needs("engine")


SEEDS = (298, 425, 2389, 178, 6, 13, 23)
"""They have every wrapper, store, optimizer, loader and act, and resume where it matters."""


class Jobs:
    """Runs histories, and keeps the results of undisturbed runs."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._numbers = itertools.count()
        self._undisturbed: dict[Any, Any] = {}

    def check(self, history: History) -> None:
        """Run a history; compare what it ends with, and what each stint began with."""
        ended = self._run(history)
        kind = history.stints[-1].kind if len(history.kinds) == 1 else Kind("plain", 1, 0)
        key = kind, history.noisy, history.optimizer
        if key not in self._undisturbed:
            alone = (Stint(kind, (), "exit"),)
            self._undisturbed[key] = self._run(History(STORES[0], False, *key[1:], "own", alone))
        run, state = self._undisturbed[key]
        seen = run["seen"]
        for epoch in range(0, NUM_STEPS, PER_EPOCH):
            steps = seen[epoch : epoch + PER_EPOCH]
            assert sorted(itertools.chain(*steps)) == list(range(SAMPLES))
        assert ended[0]["seen"] == seen
        if len(history.kinds) == 1:
            assert ended[0]["curve"] == run["curve"]
            assert ended[1] == state
        else:  # sums of gradients have another order
            assert numbers(ended[0]["curve"]) == pytest.approx(numbers(run["curve"]), abs=1e-6)
            assert numbers(ended[1]) == pytest.approx(numbers(state), abs=1e-6)

    def _run(self, history: History) -> Any:
        home = self._folder / f"home{next(self._numbers)}"
        home.mkdir()
        results: list[Any] = []
        for number, stint in enumerate(history.stints):
            results = self._ranks.run(live, stint.kind.ranks, str(home), history, number)
        check_log((home / f"{RUNS}.log").read_text().splitlines())
        assert all(result[0] == results[0][0] for result in results)
        shutil.rmtree(home)
        return results[0]


def numbers(value: Any) -> list[float]:
    """Return the numbers in a result, in order."""
    if isinstance(value, dict):
        return [n for inner in value.values() for n in numbers(inner)]
    if isinstance(value, list | tuple):
        return [n for inner in value for n in numbers(inner)]
    return [value]


def check_log(lines: list[str]) -> None:
    """Check that each load of the newest is of the save that ended last, or of one begun since."""
    allowed = [0]
    for line in lines:
        what, step = line.split(" ")
        if what == "begun":
            allowed.append(int(step))
        elif what == "newest":
            assert int(step) in allowed, lines
        if what in ("done", "newest"):
            allowed = [int(step)]


def check_histories(tmp_path: Path, seeds: Iterable[int], with_workers: bool = False) -> None:
    with Ranks(MOST_RANKS, tmp_path) as ranks:
        jobs = Jobs(ranks, tmp_path)
        for seed in seeds:
            history = drawn(random.Random(seed), workers=with_workers and seed % 10 == 0)
            try:
                jobs.check(history)
            except BaseException as e:
                e.add_note(f"seed {seed}: {history}")
                raise


def test_jobs_of_drawn_histories_end_as_undisturbed_ones(tmp_path):
    check_histories(tmp_path, SEEDS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_jobs_of_drawn_histories_end_as_undisturbed_ones(tmp_path):
    first = random.SystemRandom().randrange(1 << 30)
    check_histories(tmp_path, range(first, first + 500), with_workers=True)
