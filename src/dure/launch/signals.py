"""Signals to the launcher, as bytes in a pipe that the loop can wait for.

Those of `JobSpec.signals` end the job. SIGTSTP (Ctrl-Z) stops the ranks and the launcher. SIGUSR1
and SIGUSR2 are passed on to the ranks: with them Slurm (`--signal=USR1@120`) and others warn of the
end of the job's time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from types import FrameType

from dure.errors import LaunchError

__all__ = ["PASSED_ON", "Interrupted", "caught_signals", "first_of", "pause", "read_signals"]

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP)
"""Signals that are caught without ending the job."""


class Interrupted(LaunchError):
    """The user has asked to end while this host looks or waits for the others.

    Args:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__("interrupted while looking for the job's other hosts")
        self.number = number


@contextlib.contextmanager
def caught_signals(numbers: Iterable[int]) -> Iterator[int]:
    """Catch signals, and yield the pipe in which their numbers arrive.

    Signals that this process was started to ignore (`nohup`, a background job of a script) stay
    ignored. Python lets only the main thread catch signals: in another one, none ever arrives.
    The bytes are written by Python's C handler, so none is missed just before a wait begins.
    SIGCHLD gets its default handling, for a process that ignores it cannot see how ranks end.
    """
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before: dict[int, signal._HANDLER] = {}  # pyright: ignore[reportPrivateUsage]
    wakeup = -1
    main = threading.current_thread() is threading.main_thread()
    try:
        if main:
            wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            for number in {*numbers, *PASSED_ON}:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, _note)
            if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
                before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield read
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if main:
            signal.set_wakeup_fd(wakeup)
        os.close(read)
        os.close(write)


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: the number is in the pipe already."""


def read_signals(fd: int) -> list[int]:
    """Return the numbers of the signals that were caught here and have arrived."""
    try:
        return [number for number in os.read(fd, 256) if signal.getsignal(number) is _note]
    except BlockingIOError:
        return []


def first_of(numbers: Collection[int], fd: int) -> int | None:
    """Return the first signal of `numbers` that has arrived, while no rank runs.

    Ctrl-Z stops this process here, until it is continued.
    """
    found: int | None = None
    for number in read_signals(fd):
        if number in numbers:
            found = number if found is None else found
        elif number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)
    return found


def pause(numbers: Collection[int], fd: int, seconds: float) -> None:
    """Wait, while no rank runs, unless a signal of `numbers` arrives.

    Raises:
        Interrupted: One has arrived.
    """
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        select.select([fd], [], [], left_s)
        if (number := first_of(numbers, fd)) is not None:
            raise Interrupted(number)
