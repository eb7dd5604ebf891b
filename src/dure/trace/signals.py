"""SIGUSR2: look at a rank from outside, without stopping it.

`kill -USR2 PID` makes the rank write its flight record and say on its standard error where. The
handler is installed when the rank joins a job, only in the main thread, and only where the program
has none of its own; it is removed when the rank leaves. It runs between two steps of Python, also
while the rank waits in an operation: waits of the shm engine and of Dure's collectives over other
engines let handlers run every now and then. A child that a rank forked has the handler too, and
nothing to tell: there it does nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

from dure.trace import flight

__all__ = ["install", "remove"]

_STDERR = 2


def _dump(number: int, frame: FrameType | None) -> None:
    del number, frame
    if not flight.recording():  # the groups are those of the process that this one was forked from
        return
    try:
        text = f"flight record: {flight.dump(reason='SIGUSR2')}"
    except Exception as error:  # a rank that is only looked at goes on, whatever happens
        text = f"no flight record: {type(error).__name__}: {error}"
    with suppress(OSError):  # not sys.stderr: the handler may have interrupted a write to it
        os.write(_STDERR, f"dure: {text}\n".encode())


def _can_be_set() -> bool:
    return hasattr(signal, "SIGUSR2") and threading.current_thread() is threading.main_thread()


def _caught() -> bool:
    """Tell whether a handler that Python does not know of is there, such as faulthandler's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux: nobody tells
        return False
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (signal.SIGUSR2 - 1) & 1)


def install() -> None:
    """Dump on SIGUSR2, if this is the main thread and the program has no handler for it."""
    if _can_be_set() and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL and not _caught():
        signal.signal(signal.SIGUSR2, _dump)


def remove() -> None:
    """Take the handler away again, unless the program has put its own in its place."""
    if _can_be_set() and signal.getsignal(signal.SIGUSR2) is _dump:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
