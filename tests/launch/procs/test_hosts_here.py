"""`dure run --hosts` on this host alone, which gets its agent without ssh: signals and output."""

import signal
import subprocess

import pytest

from tests.launch.procs.launching import Launching
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.needs("ClusterShell")

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
