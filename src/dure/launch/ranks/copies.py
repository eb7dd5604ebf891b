"""Ranks that are copies of the launcher's own process, and call a function: see `dure.spawn`."""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing import util
from typing import Any  # Any: torch, which is not loaded here

from dure import env
from dure.launch.ranks import child, forking
from dure.launch.ranks.zygote import RankStart

__all__ = ["copy_of_this_process"]


def copy_of_this_process(start: RankStart, call: Callable[[], None]) -> int:
    """Fork a rank that calls `call`; return its number.

    Raises:
        OSError: There is no memory for it, or no process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: `dure.spawn` has looked
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = child.run_function(_settle(start), lambda: _run(call))
            util._run_finalizers()  # pyright: ignore
        finally:
            os._exit(code)
    return pid


def _settle(start: RankStart) -> int:
    """Let go of what is the launcher's; return the pipe for reports."""
    signal.set_wakeup_fd(-1)
    for number in {*start.spec.signals, signal.SIGUSR1, signal.SIGUSR2}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stdout, stderr, report = start.pipes
    order = {
        "cpus": start.cpus,
        "environment": dict(start.variables),
        "numbers": [0, 1, 2, *start.secrets],
    }
    fds = [os.open(os.devnull, os.O_RDONLY), stdout, stderr, *start.secrets, report]
    for fd, name in ((1, "stdout"), (2, "stderr")):  # a notebook's go to the cell
        text = io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), "utf-8", write_through=True)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), "utf-8")  # `settle` opens it anew
    report = forking.settle(order, fds, dict(env.everything()))
    child.die_with(start.launcher)
    return report


def _run(call: Callable[[], None]) -> None:
    torch: Any = sys.modules.get("torch")
    threads = env.text("OMP_NUM_THREADS") or ""
    if torch is not None and threads.isdecimal():  # read when torch was loaded, for one rank
        torch.set_num_threads(int(threads))
    call()
