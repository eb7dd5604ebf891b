"""What a group is told of its cores."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.shm import opening
from dure.store.file import FileStore
from tests.comm.options import options

pytestmark = pytest.mark.needs("engine")


def rank_1(folder: Path, threads: int = 1) -> BackendOptions:
    """Options of a rank that makes no segment."""
    return options(1, 2, FileStore(folder / "store", -1), 60, threads=threads)


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
    assert opening.ShmOpening(rank_1(tmp_path, threads))._limits() == (60.0, cores)


@pytest.mark.parametrize(("value", "migrates"), [(None, False), ("0", False), ("1", True)])
def test_ranks_move_between_cores_only_if_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None, migrates: bool
) -> None:
    passed: list[object] = []

    class Group:
        @staticmethod
        def attach(*place: object, migrates: object) -> None:
            passed.append(migrates)

    monkeypatch.delenv("DURE_CORE_MIGRATION", raising=False)
    if value is not None:
        monkeypatch.setenv("DURE_CORE_MIGRATION", value)
    monkeypatch.setattr(opening, "Group", Group)
    with open(tmp_path / "segment", "w") as segment:
        offer = f"{os.getpid()}:{segment.fileno()}:1".encode()
        opening.ShmOpening(rank_1(tmp_path)).connect([offer])
    assert passed == [migrates]
