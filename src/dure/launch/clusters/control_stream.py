"""The control stream: an agent's standard input, held by the ssh launcher that started it.

A line names a signal to pass on. The end of the stream means that the ssh launcher or the
connection has gone, and the agent must end, too: it gets SIGHUP, which ends a job as Ctrl-C does,
and SIGKILL if it still lives when its ranks had their time to end. A thread reads it, because the
agent's own loop need not know.

ssh ends with the agent's exit code, or with 255 if ssh itself failed or the agent was killed. So an
agent never ends with 255 (`code_for_ssh`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from dure.launch.supervisor import Timing

__all__ = ["SSH_FAILED", "code_by_ssh", "code_for_ssh", "end_s", "follow_control_stream"]

SSH_FAILED = 255
_IN_ITS_PLACE = 254

_MARGIN_S = 5.0


def end_s(grace_s: float | None) -> float:
    """Return the time from asking an agent to end until it is killed: more than its ranks have.

    `grace_s` is that of the job; by default ranks that catch the signal have 30 s to save.
    """
    return (Timing().saving_s if grace_s is None else grace_s) + _MARGIN_S


def code_for_ssh(code: int) -> int:
    """Return the exit code of an agent whose job ended with `code`."""
    return _IN_ITS_PLACE if code == SSH_FAILED else code


def code_by_ssh(code: int) -> int:
    """Return the exit code of the job of an agent that ended with `code`."""
    return SSH_FAILED if code == _IN_ITS_PLACE else code


def follow_control_stream(fd: int, grace_s: float | None = None) -> None:
    """Do what comes on `fd`, in a thread, until this process ends."""
    threading.Thread(
        target=_follow, args=(fd, end_s(grace_s)), name="dure control stream", daemon=True
    ).start()


def _follow(fd: int, kill_after_s: float) -> None:
    rest = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(fd, 4096):
            *lines, rest = (rest + chunk)[-4096:].split(b"\n")
            for line in lines:
                _pass_on(line.strip().decode("ascii", "replace"))
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(kill_after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def _pass_on(name: str) -> None:
    with contextlib.suppress(KeyError):
        os.kill(os.getpid(), signal.Signals[name])
