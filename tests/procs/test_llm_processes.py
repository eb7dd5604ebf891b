"""The program of examples/llm over processes: stages on one host, on two, and over each backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import dure
from dure.native import available as native_available
from dure.testing import ProcessPool, run_ranks
from procs.hosts import hosts, start_job, why_not
from ranks.test_llm import BASE, Losses, train

STEPS = 3
EXAMPLE = Path(__file__).parents[2] / "examples" / "25_llm_4d.py"
MESHES = (
    {"pp": 2, "fsdp": 2, "schedule": "Interleaved1F1B"},
    {"pp": 4, "schedule": "1F1B"},
    {"pp": 2, "tp": 2, "schedule": "ZBVZeroBubble"},
)


def _losses(rank: int) -> tuple[str, list[Losses]]:
    found: list[Losses] = []
    for sizes in MESHES:
        trainer = train.Trainer(replace(BASE, **sizes))
        found.append([trainer.train() for _ in range(STEPS)])
    return dure.get_backend(), found


@pytest.fixture(scope="module")
def expected() -> list[float]:
    def run(_: int) -> list[float]:
        trainer = train.Trainer(BASE)
        return [trainer.train()[0] for _ in range(STEPS)]

    return run_ranks(1, run)[0]


@pytest.mark.parametrize(
    ("backend", "places"), [("shm", None), ("gloo", None), ("hybrid", "aabb"), ("hybrid", "abab")]
)
def test_stages_in_processes_find_what_one_rank_finds(
    backend: str, places: str | None, expected: list[float]
) -> None:
    with ProcessPool(4, None if places else backend, hosts=places) as pool:
        for used, found in pool.run(_losses):
            assert used == backend
            for losses in found:
                assert [loss for loss, _ in losses] == pytest.approx(expected, abs=1e-10)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
@pytest.mark.skipif(not native_available()[0], reason=native_available()[1] or "no engine")
def test_stages_on_two_hosts_find_what_one_rank_finds(tmp_path: Path) -> None:
    """Two network namespaces of two ranks: two stages, each cut in two; the example compares."""
    with hosts(2) as made:
        ranks = start_job(made, 2, [EXAMPLE], tmp_path / "key")
        ends = [(r.communicate(timeout=100)[1], r.returncode) for r in ranks]
    assert [code for _, code in ends] == [0] * len(ends), ends
