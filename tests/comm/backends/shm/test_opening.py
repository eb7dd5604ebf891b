"""How many cores a group believes it has."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from pathlib import Path

import pytest

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.shm import opening
from dure.store.file import FileStore

pytestmark = pytest.mark.needs("engine")


@pytest.mark.parametrize(
    ("quota", "threads", "cores"),
    [(math.inf, 1, 8), (16.0, 1, 8), (2.0, 1, 2), (2.9, 1, 2), (0.5, 1, 1), (6.0, 2, 3)],
)
def test_a_quota_below_the_number_of_cores_counts_as_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: float, threads: int, cores: int
) -> None:
    def all_cores(pid: int) -> set[int]:
        return set(range(8 + pid))

    monkeypatch.setattr(os, "sched_getaffinity", all_cores)
    monkeypatch.setattr(opening, "_quota", lambda: quota)
    options = BackendOptions(
        store=FileStore(tmp_path / "store", -1),
        rank=1,  # which makes no segment
        size=2,
        global_ranks=(0, 1),
        timeout=timedelta(seconds=60),
        name="test",
        threads=threads,
    )
    assert opening.ShmOpening(options)._limits() == (60.0, cores)
