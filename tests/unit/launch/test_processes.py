"""Which processes are a job's, and how to signal them."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from dure.launch.ranks import processes
from dure.launch.ranks.processes import JobProcesses


def test_a_process_is_signalled_without_a_look_at_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With hundreds of loader workers, a look at all for each took seconds of the tear-down."""
    script = "setsid sleep 60 & echo $!; wait"
    with subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as rank:
        assert rank.stdout is not None
        job = JobProcesses((rank.pid,), "no job of this name")
        try:
            grandchild = int(rank.stdout.readline())
            assert grandchild in {process.pid for process in job.others()}
            monkeypatch.delattr(processes, "_all_processes")
            assert job.signal(grandchild, signal.SIGKILL)
            assert not job.signal(os.getpid(), 0)
            assert not job.signal(os.getppid(), 0)
        finally:
            rank.kill()
