"""SIGUSR2: write the flight record of a running rank.

After `kill -USR2 PID` the rank writes its flight record, and prints the path to its standard error.
The handler is installed when the rank joins a job, if that is in the main thread and the program
has not set another handler; it is removed when the rank leaves the job. Python runs it between two
instructions, also while the rank waits in an operation: waits of the shm engine, and of Dure's
collectives over other engines, regularly let handlers run. In a child that a rank has forked the
handler does nothing.
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
    if not flight.recording():  # a forked child: the groups are its parent's
        return
    try:
        text = f"flight record: {flight.dump(reason='SIGUSR2')}"
    except Exception as error:  # a failing report must not end the program
        text = f"no flight record: {type(error).__name__}: {error}"
    with suppress(OSError):  # not sys.stderr: the handler may have interrupted a write to it
        os.write(_STDERR, f"dure: {text}\n".encode())


def _can_be_set() -> bool:
    return hasattr(signal, "SIGUSR2") and threading.current_thread() is threading.main_thread()


def _caught() -> bool:
    """Return whether SIGUSR2 has a handler unknown to Python, such as faulthandler's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return False
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (signal.SIGUSR2 - 1) & 1)


def install() -> None:
    """Dump on SIGUSR2, if this is the main thread and the program has no handler for it."""
    if _can_be_set() and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL and not _caught():
        signal.signal(signal.SIGUSR2, _dump)


def remove() -> None:
    """Remove the handler, unless the program has replaced it."""
    if _can_be_set() and signal.getsignal(signal.SIGUSR2) is _dump:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
