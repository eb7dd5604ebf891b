"""The control stream: an agent's standard input, held by the ssh launcher that started it.

A line names a signal to pass on. The end of the stream means that the ssh launcher or the
connection has gone, and the agent must go, too: it gets SIGHUP, which ends a job as Ctrl-C does,
and SIGKILL if it still lives some time later. A thread reads it, for the agent's own loop need not
know; an ssh launcher that ends with the job lets go of agents that have gone already.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

__all__ = ["follow_control_stream"]

_LET_GO_S = 20.0
"""From the end of the stream to SIGKILL, should the agent not end: more than any grace it has."""


def follow_control_stream(fd: int) -> None:
    """Do what comes on `fd`, in a thread, until this process ends."""
    threading.Thread(target=_follow, args=(fd,), name="dure control stream", daemon=True).start()


def _follow(fd: int) -> None:
    rest = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(fd, 4096):
            *lines, rest = (rest + chunk)[-4096:].split(b"\n")
            for line in lines:
                _pass_on(line.strip().decode("ascii", "replace"))
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(_LET_GO_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _pass_on(name: str) -> None:
    with contextlib.suppress(KeyError):
        os.kill(os.getpid(), signal.Signals[name])
