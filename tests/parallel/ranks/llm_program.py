"""The training program of examples/llm, on meshes of several axes."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dure.testing import run_ranks

sys.path.insert(
    0,
    str(next(p for p in Path(__file__).parents if (p / "examples/llm").is_dir()) / "examples/llm"),
)

import train  # pyright: ignore[reportMissingImports]

Losses = list[tuple[float, float]]  # with the norm of the gradients, of each step
# A layer for each stage of the longest pipeline: a step costs as much as it has layers.
train.SHAPES["short"] = replace(train.SHAPES["debug"], layers=4)
BASE: Any = train.Flags(shape="short", dtype="float64", microbatches=2, batch=16)


def trained(flags: Any, steps: int) -> Losses:
    """Return what one rank of a mesh finds."""
    trainer = train.Trainer(flags)
    return [trainer.train() for _ in range(steps)]


def trained_by_threads(flags: Any, steps: int) -> list[Losses]:
    """Return what each rank of a mesh finds."""
    n = math.prod(getattr(flags, axis) for axis in train.AXES)
    return run_ranks(n, lambda _: trained(flags, steps))


def assert_same(found: Losses, expected: Losses) -> None:
    for (loss, norm), (wanted, length) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted, abs=1e-10)
        assert norm == pytest.approx(length, rel=1e-5)


def over_hosts(rank: int, folder: str) -> None:
    """Train two stages, each cut in two, on two hosts; see tests/comm/over_hosts.py."""
    flags = replace(BASE, pp=2, tp=2, schedule="ZBVZeroBubble")
    assert_same(trained(flags, 2), trained_by_threads(BASE, 2)[0])
