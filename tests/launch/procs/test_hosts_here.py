"""`dure run --hosts` on this host alone: its signals, its output, and hosts that fail.

No sshd is needed: this host gets its agent without ssh, and in some tests a program in place of ssh
runs the command here, as if hosts a and b were elsewhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch.procs.launching import Launching
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.needs("ClusterShell")

SAVE = """
    import os, signal, sys, time
    def save(number, frame):
        open("asked", "w").close()
        time.sleep(10)
        open("saved", "w").close()
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    open("ready", "w").close()
    signal.pause()
"""
FLOOD = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_blocking(1, False)
    refused = 0
    while refused < 50:
        try:
            os.write(1, b"x" * 80 + b"\\n")
            refused = 0
        except BlockingIOError:
            time.sleep(0.01)
            refused += 1
    open("full", "w").close()
    signal.pause()
"""


@pytest.mark.slow
def test_ranks_on_hosts_have_the_documented_time_to_save(job: Launching) -> None:
    launcher = job.start("--hosts", "localhost", "--no-zygote", job.write(SAVE))
    until((job.directory / "ready").exists, "a rank that runs")
    launcher.send_signal(signal.SIGTERM)
    assert job.finish(launcher).code == 143
    assert (job.directory / "saved").exists()


def test_closed_output_ends_the_job_without_a_traceback(job: Launching) -> None:
    launcher = job.start(
        "--hosts", "localhost", "--no-zygote", "--timeout-term", "0", job.write(FLOOD)
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline().startswith("[")
    launcher.stdout.close()
    launcher.stdout = None
    done = job.finish(launcher)
    assert (done.code, "Traceback" in done.err) == (128 + signal.SIGPIPE, False), done.err


def test_stopped_reader_does_not_keep_signals_from_the_hosts(job: Launching) -> None:
    launcher = job.start(
        *("--hosts", "localhost", "--no-zygote", "--timeout-term", "0", job.write(FLOOD)),
        stderr=subprocess.DEVNULL,
    )
    until((job.directory / "full").exists, "a rank that cannot write")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(PATIENCE_S) == 130


SSH = """\
#!/bin/sh
while [ "$1" != -- ]; do
    case $1 in -G) asks=1 ;; esac
    shift
done
if [ -n "$asks" ]; then echo "hostname 127.0.0.1"; exit; fi
if [ "$2" = nowhere ]; then echo "ssh: no such host" >&2; exit 255; fi
shift 2
exec sh -c "$*"
"""
FAIL = """
    import os, signal
    print("rank", os.environ["RANK"], flush=True)
    if os.environ["RANK"] == "2":
        os._exit(7)
    signal.pause()
"""


@pytest.fixture
def path(job: Launching) -> dict[str, str]:
    """Return variables with which the program in place of ssh is found."""
    ssh = Path(job.write(SSH, "bin/ssh"))
    ssh.chmod(0o755)
    return {"PATH": f"{ssh.parent}:{os.environ['PATH']}"}


def test_exit_code_is_that_of_the_first_host_that_failed(
    job: Launching, path: dict[str, str]
) -> None:
    flags = ("--hosts", "a,b", "--nproc", "2", "--no-zygote", "--no-fold")
    done = job.run(*flags, job.write(FAIL), env=path)
    assert done.code == 7, done.err
    assert {line.partition("] ")[2] for line in done.out.splitlines()} >= {"rank 2"}
    assert "rank 2 on" in done.err


def test_host_that_cannot_be_reached_is_named_and_the_others_end(
    job: Launching, path: dict[str, str]
) -> None:
    done = job.run("--hosts", "a,nowhere", "--no-zygote", job.write(FAIL), env=path)
    assert done.code == 255
    assert "host nowhere cannot be reached, or was lost: ssh: no such host" in done.err
