"""What a rank of `dure run --page` publishes for the page, every other second: its flight record.

The launcher names a folder (DURE_PAGE_DIR), and a thread writes there what `dump` would: the last
operations of each group, the last spans and marks, and where each thread is. It is a file a rank,
written anew each time, so that whoever reads it has the newest and misses what is older; and it is
short, for the page reads often. The page's end and the folder's are one: the thread then ends.

A thread of the rank's own needs no help of the program, which may be stuck in an operation. It is
started with the rank's first group, or by the first `log`. Without the folder nothing happens.

Cost: a thread that wakes every other second for some 3 ms (benchmarks/page.py), and what `spans`
cost.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path

from dure import env
from dure.errors import UsageError
from dure.trace import files, flight, line, logs
from dure.trace.marks import Mark

__all__ = ["EVERY_S", "log", "on_crash", "start", "stop"]

_log = logs.logger("trace")

EVERY_S = 2.0
_RECORDS, _SPANS, _MARKS = 150, 500, 500  # of each group; of each rank
_LONGEST_NAME, _SHOWN = 80, 100


class _Publisher:
    """Publishes the ranks of this process until the folder has gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._failed = False  # and a warning was logged
        flight.read_steps(True)
        self._thread = threading.Thread(target=self._run, name="dure-page", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self.publish("page"):
            self._ended.wait(EVERY_S)
        flight.read_steps(False)

    def stop(self) -> None:
        """End, and wait for it."""
        self._ended.set()
        self._thread.join()

    def publish(self, reason: str, *, ending: bool = False) -> bool:
        """Write the file of each rank, unless the last has been written; return whether so."""
        with self._lock:
            if self._ended.is_set() or not self._folder.is_dir():
                return False
            if ending:
                self._ended.set()
            try:
                flight.publish(self._folder, reason, (_RECORDS, _SPANS, _MARKS))
            except OSError as e:  # a full disk: the page becomes old, and the program continues
                if not self._failed:
                    self._failed = True
                    _log.warning("the page of the run is not up to date: %s", e)
        return True


_publisher: _Publisher | None = None
_asked = False


def _forget() -> None:
    """Begin anew: the process is a forked child, without its parent's thread."""
    global _publisher, _asked
    _publisher, _asked = None, False


os.register_at_fork(after_in_child=_forget)


def start() -> None:
    """Publish from now on, if this is a rank that has a page, and nobody has started it."""
    global _publisher, _asked
    if _asked:
        return
    _asked = True
    folder = env.text("DURE_PAGE_DIR")
    if folder and line.is_rank():  # and not what a rank has forked or started
        _publisher = _Publisher(Path(folder))
        atexit.register(_last_words, _publisher, os.getpid())


def stop() -> None:
    """Publish no longer, until `start` is called again."""
    global _publisher, _asked
    publisher, _publisher, _asked = _publisher, None, False
    if publisher is not None:
        publisher.stop()


def on_crash(error: BaseException) -> None:
    """Publish once more: `error` ends this rank's program. Never raises."""
    if _publisher is not None and not isinstance(error, SystemExit):
        with suppress(Exception):
            _publisher.publish(f"{files.CRASHED}{type(error).__name__}: {error}", ending=True)


def _last_words(publisher: _Publisher, pid: int) -> None:
    if os.getpid() == pid:
        with suppress(Exception):
            publisher.publish("the program's end", ending=True)


def log(step: int, **scalars: float) -> None:
    """Show the values of a step on the page of the run (`dure run --page`).

    Any rank may call it, with names of its own; each name is a curve, with a line a rank. Within
    `dure.trace.record_steps` the values are kept for `dure view`, too. Without a reader nothing
    happens, and it never waits.

    Args:
        step: The step's number, from 0 on.
        scalars: Values by name, such as `loss=0.31`; one that is not finite leaves a gap.

    Raises:
        UsageError: A value is no number (a tensor would have to be waited for), or a name has more
            than 80 characters.

    Cost: 1 us.
    """
    if type(step) is not int and not isinstance(step, Integral):
        raise UsageError("dure.log needs a step's number", seen=repr(step)[:_SHOWN])
    values = {name: _number(name, value) for name, value in scalars.items()}
    if not _asked:
        start()
    flight.mark(Mark(step=int(step), time_ns=time.monotonic_ns(), scalars=values))


def _number(name: str, value: object) -> float | None:
    if type(value) is not float and (not isinstance(value, Real) or isinstance(value, bool)):
        raise UsageError(
            f"dure.log cannot show {name}",
            seen=f"a {type(value).__name__}, and no number",
            fix=f"Give a number, such as {name}={name}.item() of a tensor.",
        )
    if len(name) > _LONGEST_NAME:
        raise UsageError("a name is too long for dure.log", seen=f"{len(name)} characters")
    number = float(value)
    return number if math.isfinite(number) else None
