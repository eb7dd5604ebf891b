"""A host that is stopped within a save: it never commits a checkpoint of the next round."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from dure.checkpoint import Checkpointer
from tests.hosts.test_faults_by_way import processes, resume, stop
from tests.hosts.ways import HostJobs

pytestmark = [pytest.mark.slow, pytest.mark.needs("network namespaces", "etcd", "engine")]


def number_inside(process: psutil.Process) -> str:
    """Return a process's number on its own host."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(line.split()[-1] for line in lines if line.startswith("NSpid:"))


def test_a_rank_that_was_stopped_before_its_commit_leaves_the_next_rounds_alone(
    tmp_path: Path,
) -> None:
    jobs = HostJobs(tmp_path, "tests.hosts.saving")
    with jobs.stack:
        job = jobs.start(
            "etcd",
            nnodes="1:2",
            each=1,
            DURE_SILENCE="4",
            PET_MAX_RESTARTS="3",
            PET_RDZV_CONF="last_call_timeout=600",
        )
        job.wait_for((job.folder / "commits").exists, "a commit")
        host, pid = (job.folder / "commits").read_text().split()
        found = [each for each in processes(job, "ab".index(host)) if each.name() != "etcd"]
        (rank,) = [each for each in found if number_inside(each) == pid]
        stop(found)
        job.wait_for((job.folder / "writes").exists, "the next round's save")
        (job.folder / "go on").touch()
        resume([rank])  # before its launcher and its reaper, which end it
        job.wait_for((job.folder / "tried").exists, "a commit")
        resume(found)
        run = job.folder / "run"
        assert sorted(path.name for path in run.glob("0*")) == ["000001-step-1", "000002-step-2"]
        (job.folder / "finish").touch()
        assert job.codes() == [0, 0], job.printed()
    assert Checkpointer(run).load(state={"made in round": None}) == 5
