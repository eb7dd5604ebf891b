"""Run pytest many times without loading torch many times.

One process imports torch, pytest, its plugins, and the modules that its caller names. Each run is a
fork of it, so a run starts in a fraction of a second, has a small heap, and leaves nothing for the
next one. The fork server of `multiprocessing`, from which ranks are forked, is forked, too: a new
interpreter would need three seconds of a core in each run to import torch.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

# What tests/conftest.py sets for the tests must be set before torch is loaded.
VARIABLES = {"OMP_NUM_THREADS": "1", "DURE_TRACE_DIR": "off"}
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
POLL_S = 0.02
HUNG = -signal.SIGKILL  # the status of a run that was ended at its limit


class ForkedPytest:
    """The process that runs of pytest are forked from. Threads: any may call it.

    Args:
        python: The interpreter.
        folder: Where the runs start.
        environment: Their environment.
        limit_s: Seconds after which a run is ended.
        modules: What the process imports beside torch and pytest. Changes of these modules, and of
            what they import, are not seen by later runs.
    """

    def __init__(
        self,
        python: Path,
        folder: Path,
        environment: dict[str, str],
        limit_s: float,
        modules: Sequence[str] = (),
    ) -> None:
        self._limit_s = limit_s
        self._process = subprocess.Popen(
            [str(python), __file__, *modules],
            cwd=folder,
            env=VARIABLES | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()
        self._statuses: list[queue.SimpleQueue[int]] = []  # of each run
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run(self, words: list[str], output: Path) -> tuple[int, str]:
        """Run pytest with these arguments; return its exit status, or `HUNG`, and its output.

        A status below 0 is the number of the signal that ended it. The output, standard error
        included, is written to a file first.
        """
        assert self._process.stdin is not None
        status: queue.SimpleQueue[int] = queue.SimpleQueue()
        with self._lock:
            request = json.dumps([len(self._statuses), str(output), self._limit_s, words])
            self._statuses.append(status)
            if self._ended:
                status.put(HUNG)
            else:
                print(request, file=self._process.stdin, flush=True)
        return status.get(), output.read_text(errors="replace") if output.exists() else ""

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, status = map(int, line.split())
            self._statuses[number].put(status)
        with self._lock:
            self._ended = True
            for status in self._statuses:
                status.put(HUNG)  # ignored if the run has ended

    def kill(self) -> None:
        """End all runs that are under way, and the process."""
        self._process.terminate()

    def close(self) -> None:
        """End the process when all runs have ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()


def serve(modules: list[str]) -> None:
    """Fork a run for each line of standard input, and print its number and how it ended."""
    if not modules:  # torch would load `dure` as one of its backends
        os.environ[AUTOLOAD] = "0"
    import pytest
    import torch._dynamo  # noqa: F401  (what nearly all tests load, for seconds)

    os.environ.pop(AUTOLOAD, None)
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
    gc.freeze()  # a collection in a run would write to these objects, and so copy their pages
    runs: dict[int, tuple[int, float]] = {}  # number and deadline, by process
    signal.signal(signal.SIGTERM, lambda *_: _end(runs))
    waiting, is_open = b"", True
    while is_open or runs:
        if is_open and select.select([0], [], [], POLL_S)[0]:
            received = os.read(0, 65536)
            is_open = bool(received)
            *lines, waiting = (waiting + received).split(b"\n")
            for line in lines:
                number, output, limit_s, words = json.loads(line)
                pid = os.fork() or _run(words, output)
                runs[pid] = (number, time.monotonic() + limit_s)
        elif not is_open:
            time.sleep(POLL_S)
        _report(runs)


def _run(words: list[str], output: str) -> NoReturn:
    import pytest
    import torch

    os.setpgrp()  # not a session: priorities would count within it only
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    written = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
    if "dure" not in sys.modules:
        torch._import_device_backends()  # pyright: ignore[reportPrivateUsage]
    _prepare_fork_server()
    status = int(pytest.main(words))
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)  # `_exit` does not
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _report(runs: dict[int, tuple[int, float]]) -> None:
    """Print the number and the status of each run that has ended, and end those that are late."""
    for process, (number, deadline) in list(runs.items()):
        pid, status = os.waitpid(process, os.WNOHANG)
        if not pid and time.monotonic() > deadline:
            os.killpg(process, signal.SIGKILL)
            pid, status = os.waitpid(process, 0)
        if pid:
            del runs[process]
            print(number, os.waitstatus_to_exitcode(status), flush=True)


def _prepare_fork_server() -> None:
    """Fork the server that `ForkServer.ensure_running` would start; that then finds it running.

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


def _end(runs: Iterable[int]) -> None:
    for child in runs:
        os.killpg(child, signal.SIGKILL)
    sys.exit(1)


if __name__ == "__main__":
    serve(sys.argv[1:])
