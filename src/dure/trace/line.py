"""The line to the launcher: what a rank of `dure run` tells of itself while it runs.

The launcher gives each rank a pipe, which `child.py` makes known as `__dure_line__`. Four
things go through it from here, a JSON object a line each:

- `progress`: the step that the program has come to, if it says so (`dure.progress`, `StepMeter`);
- `answers`: that this rank will tell its last operation when it is asked for its stack;
- `elastic`: that it has entered `dure.elastic.run`, or waits there for a new group;
- `last`: that operation, upon the launcher's signal, or when the rank crashes.

The signal is faulthandler's, which writes the stack in C and then calls the handler it replaced.
So the Python handler is put below it: the stack comes at once, whatever the rank is doing, and the
operation as soon as Python runs (waits of collectives let handlers run).

A rank never waits for the launcher: what does not fit into the pipe is not told. Where no launcher
listens, all of this does nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Generator
from types import FrameType
from typing import Any  # Any: what the module made by child.py holds

from dure.trace import flight
from dure.trace.events import State
from dure.trace.record import describe

__all__ = [
    "answer_launcher",
    "is_rank",
    "last_operation",
    "progress",
    "tell_elastic",
    "tell_last",
    "waiting_for_group",
]

_EVERY_S = 0.1
_next_at = 0.0
_waits_for_group = False
_answering = -1  # the process that answers


def _line() -> Any:
    """Return the launcher's line, or None where there is none of this process's own."""
    line = sys.modules.get("__dure_line__")
    return line if line is not None and getattr(line, "pid", -1) == os.getpid() else None


def is_rank() -> bool:
    """Tell whether this process is a rank of a launcher, and not something that a rank started."""
    return _line() is not None


def _tell(content: dict[str, object]) -> None:
    line = _line()
    if line is None:
        return
    text = json.dumps(content, default=str, ensure_ascii=False)
    data = b"\n" + text.encode(errors="replace") + b"\n"
    try:
        # Up to PIPE_BUF bytes are written whole or not at all, and at once if poll says so.
        poll = select.poll()
        poll.register(line.fd, select.POLLOUT)
        if len(data) <= select.PIPE_BUF and poll.poll(0):
            os.write(line.fd, data)
    except (OSError, ValueError):  # the launcher has gone, or the program closed what it had
        return


def progress(step: int, total: int | None = None, **values: float | str) -> None:
    """Report to the launcher how far this rank has come, for `dure run --page` and for its summary.

    Does nothing where no launcher listens. At most ten calls a second are told, and the last one
    (`step == total`) always.

    Args:
        step: Which step has been done.
        total: Of how many, where that is known.
        values: What else to show, such as `loss=0.31`; a few short ones.

    Cost: 0.5 us, and 15 us for a call that is told.
    """
    global _next_at
    now = time.monotonic()
    if now < _next_at and step != total:
        return
    _next_at = now + _EVERY_S
    shown = {  # JSON has no NaN
        k: round(v, 6) if isinstance(v, float) and math.isfinite(v) else str(v)
        for k, v in values.items()
    }
    _tell({"progress": {"step": step, "total": total, "values": shown}})


def last_operation() -> str:
    """Describe this process's last operation: what, where, and how far it came; empty if none."""
    if _waits_for_group:
        return "agreement on a new group in dure.elastic.run, still in it"
    records = flight.recorded()
    if not records:
        return ""
    running = [r for r in records if r.state is State.STARTED and not r.async_op]
    record = (running or records)[-1]
    text = f"{describe(record)} of group {record.group!r}"
    text += f" at {record.site}" if record.site else ""
    if record.state is State.STARTED:
        return f"{text}, still in it"
    ago_s = (time.monotonic_ns() - record.end_ns) / 1e9
    how = f"failed with {record.error}" if record.state is State.FAILED else "ended"
    return f"{text}, {how} {ago_s:.3g} s earlier"


def tell_last() -> None:
    """Tell the launcher this process's last operation."""
    try:
        text = last_operation()
    except Exception as error:  # a rank that is only asked, or on its way out, goes on
        text = f"unknown ({type(error).__name__})"
    _tell({"last": text[:1000]})


def tell_elastic() -> None:
    """Tell the launcher that this rank's program recovers by itself when a peer dies.

    Again and again while ranks are missing: for the launcher it is a sign of work.
    """
    _tell({"elastic": True})


@contextlib.contextmanager
def waiting_for_group() -> Generator[None]:
    """While the block runs, the last operation of this rank is that it waits for a new group."""
    global _waits_for_group
    _waits_for_group = True
    try:
        yield
    finally:
        _waits_for_group = False


def answer_launcher() -> None:
    """Tell the last operation whenever the launcher asks for the stack, from now on."""
    global _answering
    line = _line()
    if line is None or _answering == line.pid:
        return
    if threading.current_thread() is not threading.main_thread():
        return
    number = int(line.stack_signal)
    try:
        faulthandler.unregister(number)
        signal.signal(number, _asked)
        faulthandler.register(number, file=line.fd, all_threads=False, chain=True)
    except (OSError, ValueError, RuntimeError):  # the program closed the pipe
        return
    _answering = line.pid
    _tell({"answers": True})


def _asked(number: int, frame: FrameType | None) -> None:
    del number, frame
    tell_last()
