"""The program of examples/llm, on meshes of all axes: the losses of one rank, to 1e-10.

Twelve meshes that have every pair of axes, for as many steps as show what the optimizer has made
of gradients and of its state; all that 1, 2, 4 and 8 ranks can form, for longer, are run by
`pytest -m slow tests/ranks/test_llm.py`.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dure.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llm"))

import train  # pyright: ignore[reportMissingImports]

STEPS, FEW_STEPS, PATIENCE_S = 10, 4, 150.0
Losses = list[tuple[float, float]]
BASE: Any = train.Flags(dtype="float64", steps=STEPS, microbatches=2, batch=16)
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


def losses(flags: Any, steps: int) -> list[Losses]:
    """Return each rank's losses and norms."""
    n = math.prod(getattr(flags, axis) for axis in train.AXES)

    def run(_: int) -> Losses:
        trainer = train.Trainer(flags)
        return [trainer.train() for _ in range(steps)]

    return run_ranks(n, run, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def expected() -> Losses:
    """Return what one rank finds."""
    return losses(BASE, STEPS)[0]


def check(sizes: tuple[int, ...], schedule: str, expected: Losses) -> None:
    """Train as many steps as are expected."""
    flags = replace(BASE, **dict(zip(train.AXES, sizes, strict=True)), schedule=schedule)
    for found in losses(flags, len(expected)):
        for (loss, norm), (wanted, length) in zip(found, expected, strict=True):
            assert loss == pytest.approx(wanted, abs=1e-10)
            assert norm == pytest.approx(length, rel=1e-5)


def test_one_rank_learns(expected: Losses) -> None:
    assert expected[0][0] > 5.4 > 4.0 > expected[-1][0]


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ((2, 1, 1, 1, 1), "1F1B"),  # pp, dp, fsdp, cp, tp
        ((1, 2, 2, 1, 1), "1F1B"),
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
def test_a_mesh_finds_what_one_rank_finds(
    sizes: tuple[int, ...], schedule: str, expected: Losses
) -> None:
    check(sizes, schedule, expected[:FEW_STEPS])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"pp": 2, "fsdp": 2}, {"tp": 2, "cp": 2}),
        ({"pp": 2, "tp": 2, "schedule": "ZBVZeroBubble"}, {"pp": 2, "dp": 2, "schedule": "GPipe"}),
        ({"fsdp": 2}, {"pp": 4}),
    ],
)
def test_a_job_goes_on_with_another_mesh(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path, expected: Losses
) -> None:
    def run(sizes: dict[str, Any], steps: int) -> Losses:
        flags = replace(BASE, **sizes, checkpoint=str(tmp_path / "saved"))

        def one(_: int) -> Losses:
            trainer = train.Trainer(flags)
            if (tmp_path / "saved").exists():
                trainer.resume()
            found = [trainer.train() for _ in range(steps)]
            trainer.save()
            return found

        n = math.prod(sizes.get(axis, 1) for axis in train.AXES)
        return run_ranks(n, one, timeout=PATIENCE_S)[-1]

    found = run(before, 2) + run(after, 2)
    assert [loss for loss, _ in found] == pytest.approx([x for x, _ in expected[:4]], abs=1e-10)


def all_meshes() -> list[tuple[tuple[int, ...], str]]:
    """Return every mesh of 1, 2, 4 and 8 ranks with at most 4 along tp, schedules in turn."""
    grids = itertools.product((1, 2, 4, 8), repeat=len(train.AXES))
    fitting = [sizes for sizes in grids if math.prod(sizes) <= 8 and sizes[-1] <= 4]
    return [
        (sizes, SCHEDULES[i % len(SCHEDULES)] if sizes[0] in (2, 4) else "1F1B")
        for i, sizes in enumerate(fitting)
    ]


def name(case: tuple[tuple[int, ...], str]) -> str:
    """Return what a case is called: the axes that have several ranks."""
    sizes, schedule = case
    parts = [f"{axis}{n}" for axis, n in zip(train.AXES, sizes, strict=True) if n > 1]
    return "-".join([*parts, schedule])


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "schedule"), all_meshes(), ids=map(name, all_meshes()))
def test_every_mesh_finds_what_one_rank_finds(
    sizes: tuple[int, ...], schedule: str, expected: Losses
) -> None:
    check(sizes, schedule, expected)
