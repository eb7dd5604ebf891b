"""Which processes are a job's, and how to signal them."""

import contextlib
import errno
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dure.launch.ranks import processes
from dure.launch.ranks.processes import JobProcesses, adopting_orphans, start_times
from dure.launch.ranks.spawn import start_rank
from dure.launch.spec import JobSpec


def test_a_process_is_signalled_without_a_look_at_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With hundreds of loader workers, a look at all for each took seconds of the tear-down."""
    script = "setsid sh -c 'echo $$; exec sleep 60' & wait"
    with subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as rank:
        job = JobProcesses(start_times((rank.pid,)), "no job of this name")
        try:
            grandchild = int(rank.stdout.readline())
            assert grandchild in {process.pid for process in job.others()}
            assert [p.pid for p in job.others(detached=False)] == []  # it has a session of its own
            monkeypatch.delattr(processes, "_all_processes")
            below = JobProcesses(start_times((rank.pid,)), "no job of this name", below=os.getpid())
            assert [p.pid for p in below.others()] == [grandchild]
            assert job.signal(grandchild, signal.SIGKILL)
            assert not job.signal(os.getpid(), 0)
            assert not job.signal(os.getppid(), 0)
        finally:
            rank.kill()


def test_rank_that_cannot_be_watched_is_not_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def none_left(pid: int, flags: int = 0) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    program = tmp_path / "program.py"
    program.write_text("import time; time.sleep(600)")
    key = os.memfd_create("key")
    with pytest.raises(OSError, match="too many open files"):
        start_rank(JobSpec(program=str(program)), 0, {}, (key,))
    os.close(key)
    assert not os.path.exists(f"/proc/{started[0]}")


def has_become(pid: int, name: str) -> None:
    """Wait for the end of an `exec`, within which a process has no environment."""
    process = Path(f"/proc/{pid}")
    while not (
        process.joinpath("comm").read_text().strip() == name
        and process.joinpath("environ").read_bytes()
    ):
        time.sleep(0.001)


def test_detached_process_that_dies_to_the_launcher_is_reaped() -> None:
    script = "setsid sh -c 'echo $$; exec sleep 60' & read line"
    pipe = subprocess.PIPE
    environment = {"DURE_LAUNCHER": "a job"}
    with (
        adopting_orphans(),
        subprocess.Popen(
            ["sh", "-c", script],
            text=True,
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,
            env=environment,
        ) as rank,
    ):
        detached = int(rank.stdout.readline())
        rank.stdin.close()
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)  # and its child is ours
        job = JobProcesses(start_times((rank.pid,)), "a job", below=os.getpid())
        has_become(detached, "sleep")
        try:
            assert [p.pid for p in job.others()] == [detached]
            assert job.signal(detached, signal.SIGKILL)
            os.waitid(os.P_PID, detached, os.WEXITED | os.WNOWAIT)
            assert job.others() == []
            assert not os.path.exists(f"/proc/{detached}")
        finally:
            with contextlib.suppress(OSError):
                os.kill(detached, signal.SIGKILL)
                os.waitpid(detached, 0)
