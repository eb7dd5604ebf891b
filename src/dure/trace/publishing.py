"""Publishing the flight record of a rank for the page of the run (`dure run --page`).

The launcher sets a folder (DURE_PAGE_DIR). A thread of each rank writes a short flight record to a
file there every two seconds: the last operations of each group, the last spans and marks, and the
stacks of the threads. Each file replaces the one before it. When the page ends, the launcher
deletes the folder, and the thread ends.

A separate thread works even while the program is stuck in an operation. It is started with the
rank's first group, or by the first `log`. Without the folder nothing happens.

Cost: a thread that runs for about 3 ms every two seconds (benchmarks/page.py), and the cost of
recording spans.
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
_RECORDS, _SPANS, _MARKS = 150, 500, 500  # per group; per rank
_LONGEST_NAME, _SHOWN = 80, 100


class _Publisher:
    """Publishes the flight records of this process's ranks until the folder is deleted."""

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
        """Stop the thread, and wait for its end."""
        self._ended.set()
        self._thread.join()

    def publish(self, reason: str, *, ending: bool = False) -> bool:
        """Write the file of each rank and return True; False after the last file was written."""
        with self._lock:
            if self._ended.is_set() or not self._folder.is_dir():
                return False
            if ending:
                self._ended.set()
            try:
                flight.publish(self._folder, reason, (_RECORDS, _SPANS, _MARKS))
            except OSError as e:  # such as a full disk: the program continues with an old page
                if not self._failed:
                    self._failed = True
                    _log.warning("the page of the run is not up to date: %s", e)
        return True


_publisher: _Publisher | None = None
_started = False


def _reset() -> None:
    """Reset the state in a forked child, which does not have its parent's thread."""
    global _publisher, _started
    _publisher, _started = None, False


os.register_at_fork(after_in_child=_reset)


def start() -> None:
    """Start to publish, if this process is a rank with a page, and unless it was started."""
    global _publisher, _started
    if _started:
        return
    _started = True
    folder = env.text("DURE_PAGE_DIR")
    if folder and line.is_rank():  # not a process that a rank has forked or started
        _publisher = _Publisher(Path(folder))
        atexit.register(_publish_last, _publisher, os.getpid())


def stop() -> None:
    """Stop publishing until `start` is called again."""
    global _publisher, _started
    publisher, _publisher, _started = _publisher, None, False
    if publisher is not None:
        publisher.stop()


def on_crash(error: BaseException) -> None:
    """Publish for the last time before `error` ends this rank's program. Never raises."""
    if _publisher is not None and not isinstance(error, SystemExit):
        with suppress(Exception):
            _publisher.publish(f"{files.CRASHED}{type(error).__name__}: {error}", ending=True)


def _publish_last(publisher: _Publisher, pid: int) -> None:
    if os.getpid() == pid:
        with suppress(Exception):
            publisher.publish("the program's end", ending=True)


def log(step: int, **scalars: float) -> None:
    """Show the values of a step on the page of the run (`dure run --page`).

    Any rank may call it, with any names; each name is a plot with one line per rank. Inside
    `dure.trace.record_steps` the values are recorded for `dure view`, too. Otherwise, and without a
    page, nothing happens. It never waits.

    Args:
        step: The step's number, from 0 on.
        scalars: Values by name, such as `loss=0.31`; a value that is not finite leaves a gap.

    Raises:
        UsageError: A value is not a number (reading one from a tensor could wait), or a name has
            more than 80 characters.

    Cost: 1 us.

    Example:
        ```python
        dist.log(0, loss=0.31, accuracy=0.5)
        ```
    """
    if type(step) is not int and not isinstance(step, Integral):
        raise UsageError("dure.log needs a step's number", seen=repr(step)[:_SHOWN])
    values = {name: _number(name, value) for name, value in scalars.items()}
    if not _started:
        start()
    flight.mark(Mark(step=int(step), time_ns=time.monotonic_ns(), scalars=values))


def _number(name: str, value: object) -> float | None:
    if type(value) is not float and (not isinstance(value, Real) or isinstance(value, bool)):
        raise UsageError(
            f"dure.log cannot show {name}",
            seen=f"expected a number, got a {type(value).__name__}",
            fix=f"Pass a number; for a tensor, {name}={name}.item().",
        )
    if len(name) > _LONGEST_NAME:
        raise UsageError("a name is too long for dure.log", seen=f"{len(name)} characters")
    number = float(value)
    return number if math.isfinite(number) else None
