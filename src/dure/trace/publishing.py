"""Publishing what a rank has recorded: for the page of the run, and for its metrics.

*The page* (`dure run --page`). The launcher sets a folder (DURE_PAGE_DIR). A thread of each rank
writes a short flight record to a file there every two seconds: the last operations of each group,
the last spans and marks, and the stacks of the threads. Each file replaces the one before it. When
the page ends, the launcher deletes the folder, and the thread ends.

*Metrics* (`dure run --metrics-port`). The same with DURE_METRICS_DIR, once a second, and the files
have counts of operations (`counting`).

A separate thread works even while the program is stuck in an operation. It is started with the
rank's first group, or by the first `log`. Without the folder nothing happens.

Cost:
    For the page, a thread that runs for about 3 ms every two seconds (benchmarks/page.py), and the
    cost of recording spans; for metrics, see docs/metrics.md.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path

from dure import env
from dure.errors import UsageError
from dure.trace import counting, files, flight, line, logs
from dure.trace.marks import Mark

__all__ = ["EVERY_S", "log", "on_crash", "start", "stop"]

_log = logs.logger("trace")

EVERY_S = 2.0
_RECORDS, _SPANS, _MARKS = 150, 500, 500  # per group; per rank
_LONGEST_NAME, _SHOWN = 80, 100


class _Publisher:
    """Publishes what this process's ranks have recorded until the folder is deleted.

    Args:
        folder: The folder.
        name: Of the thread.
        every_s: How often.
        write: Writes the files; gets the folder and the reason.
        reads_steps: Whether spans and marks are recorded for it.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        every_s: float,
        write: Callable[[Path, str], None],
        reads_steps: bool = False,
    ) -> None:
        self._folder, self._every_s, self._write = folder, every_s, write
        self._reads_steps = reads_steps
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._failed = False  # and a warning was logged
        if reads_steps:
            flight.read_steps(True)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self.publish("page"):
            self._ended.wait(self._every_s)
        if self._reads_steps:
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
                self._write(self._folder, reason)
            except OSError as e:  # such as a full disk: the program continues with old files
                if not self._failed:
                    self._failed = True
                    _log.warning("the page or the metrics of the run are not up to date: %s", e)
        return True


def _write_page(folder: Path, reason: str) -> None:
    flight.publish(folder, reason, (_RECORDS, _SPANS, _MARKS))


def _counting() -> Callable[[Path, str], None]:
    counts: dict[int, counting.Counts] = {}
    return lambda folder, _: counting.write_counts(folder, counts)


_publishers: list[_Publisher] = []
_started = False


def _reset() -> None:
    """Reset the state in a forked child, which does not have its parent's thread."""
    global _started
    _publishers.clear()
    _started = False


os.register_at_fork(after_in_child=_reset)


def start() -> None:
    """Start to publish, if this process is a rank and the launcher wants it; once."""
    global _started
    if _started:
        return
    _started = True
    if not line.is_rank():  # a process that a rank has forked or started
        return
    if folder := env.text("DURE_PAGE_DIR"):
        _publishers.append(_Publisher(Path(folder), "dure-page", EVERY_S, _write_page, True))
    if folder := env.text("DURE_METRICS_DIR"):
        every_s = counting.EVERY_S
        _publishers.append(_Publisher(Path(folder), "dure-metrics", every_s, _counting()))
    for publisher in _publishers:
        atexit.register(_publish_last, publisher, os.getpid())


def stop() -> None:
    """Stop publishing until `start` is called again."""
    global _started
    publishers, _started = _publishers[:], False
    _publishers.clear()
    for publisher in publishers:
        publisher.stop()


def on_crash(error: BaseException) -> None:
    """Publish for the last time before `error` ends this rank's program. Never raises."""
    for publisher in [] if isinstance(error, SystemExit) else _publishers:
        with suppress(Exception):
            publisher.publish(f"{files.CRASHED}{type(error).__name__}: {error}", ending=True)


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

    Cost:
        1 us.

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
