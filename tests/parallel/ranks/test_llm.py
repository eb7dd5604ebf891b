"""The program of examples/llm, on meshes of all axes: the losses of one rank, to 1e-10.

Eleven meshes that have every pair of axes, for two steps: the second shows what the optimizer made
of the first one's gradients.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dure.testing import run_ranks
from tests.parallel.ranks.llm_program import BASE, Losses, assert_same, train, trained_by_threads


@pytest.fixture(scope="module")
def expected() -> Losses:
    """Return what one rank finds."""
    return trained_by_threads(BASE, 2)[0]


def check(base: Any, sizes: tuple[int, ...], schedule: str, expected: Losses) -> None:
    flags = replace(base, **dict(zip(train.AXES, sizes, strict=True)), schedule=schedule)
    for found in trained_by_threads(flags, len(expected)):
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ((1, 2, 2, 1, 1), "1F1B"),  # pp, dp, fsdp, cp, tp
        ((2, 2, 1, 1, 1), "GPipe"),
        ((2, 1, 2, 1, 1), "Interleaved1F1B"),
        ((2, 1, 1, 2, 1), "ZBVZeroBubble"),
        ((2, 1, 1, 1, 2), "InterleavedZeroBubble"),
        ((1, 2, 1, 2, 1), "1F1B"),
        ((1, 2, 1, 1, 2), "1F1B"),
        ((1, 1, 2, 2, 1), "1F1B"),
        ((1, 1, 2, 1, 2), "1F1B"),
        ((1, 1, 1, 2, 2), "1F1B"),
        ((2, 1, 2, 1, 2), "1F1B"),
    ],
)
def test_a_mesh_finds_what_one_rank_finds(sizes, schedule, expected):
    check(BASE, sizes, schedule, expected)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"pp": 2, "fsdp": 2}, {"tp": 2, "cp": 2}),
        ({"pp": 2, "tp": 2, "schedule": "ZBVZeroBubble"}, {"pp": 2, "dp": 2, "schedule": "GPipe"}),
        ({"fsdp": 2}, {"pp": 4}),
    ],
)
def test_a_job_resumes_with_another_mesh(before, after, tmp_path, expected):
    saved = tmp_path / "saved"

    def step(sizes: dict[str, Any]) -> float:
        def body(_: int) -> float:
            trainer = train.Trainer(replace(BASE, **sizes, checkpoint=str(saved)))
            if saved.exists():
                trainer.resume()
            loss, _ = trainer.train()
            trainer.save()
            return loss

        return run_ranks(math.prod(sizes.get(axis, 1) for axis in train.AXES), body)[-1]

    found = [step(before), step(after)]
    assert found == pytest.approx([loss for loss, _ in expected], abs=1e-10)
