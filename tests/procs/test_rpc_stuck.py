"""Programs in which threads, or processes, could wait for each other for good."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure import native
from procs.launching import Launching, launching

pytestmark = pytest.mark.skipif(not native.available()[0], reason="needs the native engine")

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launching]:
    yield from launching(tmp_path)


def test_threads_compute_with_a_leaf_while_others_go_back_to_it() -> None:
    """torch would keep Python's lock for ever, so that no limit within the process helps."""
    program = [sys.executable, str(PROGRAMS / "rpc_leaves.py")]
    ended = subprocess.run(program, timeout=60, capture_output=True, text=True, check=True)
    assert ended.stdout == "ended\n"


def test_two_train_by_ddp_and_serve_each_other(launcher: Launching) -> None:
    job = launcher.run("--nproc", "2", str(PROGRAMS / "rpc_ddp_both_ways.py"))
    assert job.code == 0, job.err
    assert [job.lines(rank) for rank in (0, 1)] == [["ended"], ["ended"]]
