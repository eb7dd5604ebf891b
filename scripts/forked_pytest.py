"""Run pytest many times without loading torch many times.

A process loads torch and pytest, and nothing of `dure`; each run is a fork of it. So a run starts
in a fraction of a second, with a small heap, and nothing of one run is left in the next.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HUNG = -signal.SIGKILL  # the status of a run that was ended at its limit


class ForkedPytest:
    """The process that runs of pytest are forked from. Threads: one at a time may call it.

    Args:
        python: The interpreter.
        folder: Where the runs start.
        environment: Their environment.
        output: The file with the output of the last run, standard error included.
        limit_s: Seconds after which a run is ended.
    """

    def __init__(
        self, python: Path, folder: Path, environment: dict[str, str], output: Path, limit_s: float
    ) -> None:
        self._output, self._limit_s = output, limit_s
        self._process = subprocess.Popen(
            [str(python), __file__],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, words: list[str]) -> tuple[int, str]:
        """Run pytest with these arguments; return its exit status, or `HUNG`, and its output.

        A status below 0 is the number of the signal that ended it.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = json.dumps([str(self._output), self._limit_s, words])
        print(asked, file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline() or HUNG)
        return status, self._output.read_text(errors="replace")

    def kill(self) -> None:
        """End a run that is under way, and the process. Any thread may call it."""
        self._process.terminate()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Fork a run for each line of standard input, and print how it ended."""
    import pytest
    import torch._dynamo  # noqa: F401  (what nearly all tests load, for seconds)

    for line in sys.stdin:
        output, limit_s, words = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setpgrp()  # not a session: priorities would count within it only
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            written = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(written, 1)
            os.dup2(written, 2)
            status = int(pytest.main(words))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        signal.signal(signal.SIGTERM, lambda *_, child=child: _end(child))
        print(_status(child, limit_s), flush=True)


def _end(child: int) -> None:
    os.killpg(child, signal.SIGKILL)
    sys.exit(1)


def _status(child: int, limit_s: float) -> int:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return HUNG


if __name__ == "__main__":
    serve()
