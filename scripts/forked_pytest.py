"""Run pytest many times without loading torch many times.

A process loads torch, pytest and its plugins, and of `dure` what its caller names; each run is a
fork of it. So a run starts in a fraction of a second, with a small heap, and nothing of one run is
left in the next. The fork server of `multiprocessing`, which ranks are forked from, is a fork as
well: a new interpreter would load torch again in each run, for three seconds of a core.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

# What tests/conftest.py sets for the tests must be set before torch is loaded.
VARIABLES = {"OMP_NUM_THREADS": "1", "DURE_TRACE_DIR": "off"}
HUNG = -signal.SIGKILL  # the status of a run that was ended at its limit


class ForkedPytest:
    """The process that runs of pytest are forked from. Threads: one at a time may call it.

    Args:
        python: The interpreter.
        folder: Where the runs start.
        environment: Their environment.
        output: The file with the output of the last run, standard error included.
        limit_s: Seconds after which a run is ended.
        modules: What the process loads beside torch and pytest. Changes of these modules' sources,
            and of what they import, are not seen by later runs.
    """

    def __init__(
        self,
        python: Path,
        folder: Path,
        environment: dict[str, str],
        output: Path,
        limit_s: float,
        modules: Sequence[str] = (),
    ) -> None:
        self._output, self._limit_s = output, limit_s
        self._process = subprocess.Popen(
            [str(python), __file__, *modules],
            cwd=folder,
            env=VARIABLES | environment,
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


def serve(modules: list[str]) -> None:
    """Fork a run for each line of standard input, and print how it ended."""
    import pytest
    import torch._dynamo  # noqa: F401  (what nearly all tests load, for seconds)

    silent = os.open(os.devnull, os.O_WRONLY)
    output = os.dup(1)
    os.dup2(silent, 1)
    # Loads the plugins, and tests/conftest.py, which imports much of `dure`.
    pytest.main(["--help", "-p", "no:cacheprovider", *(() if modules else ("--noconftest",))])
    os.dup2(output, 1)
    os.close(output)
    os.close(silent)
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is loaded stays: a collection in a run would write to, so copy, all of it
    for line in sys.stdin:
        file, limit_s, words = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setpgrp()  # not a session: priorities would count within it only
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            written = os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(written, 1)
            os.dup2(written, 2)
            _prepare_fork_server()
            status = int(pytest.main(words))
            shutil.rmtree(util.get_temp_dir(), ignore_errors=True)  # `_exit` does not
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        signal.signal(signal.SIGTERM, lambda *_, child=child: _end(child))
        print(_status(child, limit_s), flush=True)


def _prepare_fork_server() -> None:
    """Fork what `ForkServer.ensure_running`, which then finds it running, would start.

    It loads what ranks need when the first process is requested. Since Python 3.14 the server has a
    key: there, each run starts a server of its own.
    """
    server: Any = vars(forkserver)["_forkserver"]
    if hasattr(server, "_forkserver_authkey"):
        return
    resource_tracker.ensure_running()
    listener = socket.socket(socket.AF_UNIX)
    address = f"{util.get_temp_dir()}/ranks"
    listener.bind(address)
    listener.listen()
    alive, kept = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(kept)
        status = 1
        try:
            if listener in select.select([listener, alive], [], [])[0]:
                pool = importlib.import_module("dure.testing.pool")
                forkserver.main(listener.detach(), alive, pool._PRELOAD)
        except SystemExit:
            status = 0
        os._exit(status)
    listener.close()
    os.close(alive)
    server._forkserver_address = address
    server._forkserver_alive_fd = kept
    server._forkserver_pid = pid


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
    serve(sys.argv[1:])
