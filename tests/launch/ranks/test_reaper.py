"""The reaper: what ends a job's processes when the launcher cannot."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure.launch.agent.membership import boottime
from dure.launch.ranks import reaper
from dure.launch.ranks.processes import start_times
from dure.launch.ranks.reaper import Reaper
from tests.waiting import PATIENCE_S, until

LATER_S = 0.5
ZEROES_ENVIRONMENT = """
import ctypes, time
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
ctypes.memset(int(fields[47]), 0, int(fields[48]) - int(fields[47]))
print("ready", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def rank(*words: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process as ranks are started, and read the line with which it reports itself."""
    process = subprocess.Popen(words, env=variables, start_new_session=True, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_ranks_die_at_the_latest_deadline_and_not_before() -> None:
    job = uuid.uuid4().hex
    with rank("sleep", "600", DURE_LAUNCHER=job) as process, contextlib.closing(Reaper(job)) as own:
        own.extend(boottime() - 1)  # before it has even started
        deadline = boottime() + LATER_S
        own.extend(deadline)
        assert process.wait(PATIENCE_S) == -9
        assert boottime() >= deadline


def test_rank_that_has_overwritten_its_environment_dies_at_the_deadline() -> None:
    job = uuid.uuid4().hex
    words = (sys.executable, "-c", ZEROES_ENVIRONMENT)
    with rank(*words, DURE_LAUNCHER=job) as process, contextlib.closing(Reaper(job)) as own:
        assert process.stdout.readline() == b"ready\n"
        own.watch(start_times([process.pid]))
        own.extend(boottime() - 1)
        assert process.wait(PATIENCE_S) == -9


def test_process_that_has_got_the_number_of_a_rank_is_left_alone() -> None:
    job = uuid.uuid4().hex
    with (
        rank("sleep", "600") as other,
        rank("sleep", "600") as own_rank,
        contextlib.closing(Reaper(job)) as own,
    ):
        own.watch(
            {other.pid: start_times([other.pid])[other.pid] - 1} | start_times([own_rank.pid])
        )
        own.extend(boottime() - 1)
        assert own_rank.wait(PATIENCE_S) == -9
        assert other.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_request_to_end_that_reaches_all_processes_does_not_end_it(number: int) -> None:
    job = uuid.uuid4().hex
    with rank("sleep", "600", DURE_LAUNCHER=job) as process, contextlib.closing(Reaper(job)) as own:
        until(lambda: ignores(own.pid, number))
        os.kill(own.pid, number)
        own.extend(boottime() - 1)
        assert process.wait(PATIENCE_S) == -9


def ignores(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line for line in lines if line.startswith("SigIgn:"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def test_report_of_a_death_ignores_modules_in_the_working_directory(tmp_path: Path) -> None:
    """`python -c` would import them in place of the standard library's."""
    for name in ("types", "random", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        about = f'{{"job": "{uuid.uuid4().hex}", "spared": null, "python": "{tmp_path}/python"}}'
        (tmp_path / "python").write_text(
            f'#!/bin/sh\n"{sys.executable}" "$@" >out 2>&1\necho $? >>out'
        )
        (tmp_path / "python").chmod(0o755)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, str(theirs.fileno()), about],
            pass_fds=[theirs.fileno()],
            cwd=tmp_path,
        )
        theirs.close()
        ours.send(b"W" + b"not a will")
        ours.close()
        assert process.wait(PATIENCE_S) == 0
    out = (tmp_path / "out").read_text()
    assert "membership.py" in out  # it came as far as to read the will
    assert out.splitlines()[-1] == "1"
