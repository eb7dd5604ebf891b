"""Status messages from a rank to its launcher (`dure run`).

The launcher gives each rank a pipe, which `child.py` publishes as module `__dure_line__`. A rank
sends four kinds of messages, each a JSON object on one line:

- `progress`: the number of a finished step (`dure.progress`, `StepMeter`);
- `answers`: this rank will report its last operation when the launcher asks for its stack;
- `elastic`: this rank has entered `dure.elastic.run`, or waits there for a new group;
- `last`: the last operation, sent after the launcher's signal or before the rank crashes.

The signal is handled by faulthandler, which writes the stack in C and then calls the handler that
was installed before it, ours. So the launcher gets the stack at once, even from a stuck rank, and
the operation as soon as Python code runs (waits of collectives let handlers run). With
DURE_TRACE_DIR a second signal lets the rank write its flight record: the launcher sends it before
it ends ranks that hang.

A rank never waits for the launcher: a message that does not fit into the pipe is dropped. Without a
launcher all functions do nothing.
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
from typing import Any  # Any: the module made by child.py

from dure.trace import flight
from dure.trace.events import State
from dure.trace.record import describe

__all__ = [
    "answer_launcher",
    "is_rank",
    "last_operation",
    "progress",
    "send_elastic",
    "send_last_operation",
    "waiting_for_group",
]

_EVERY_S = 0.1
_next_at = 0.0
_waits_for_group = False
_answering = -1  # the process that answers


def _line() -> Any:
    """Return the module of this process's pipe; None if there is none, or only its parent's."""
    line = sys.modules.get("__dure_line__")
    return line if line is not None and getattr(line, "pid", -1) == os.getpid() else None


def is_rank() -> bool:
    """Return whether this process is a rank of a launcher, and not a child of a rank."""
    return _line() is not None


def _send(content: dict[str, object]) -> None:
    line = _line()
    if line is None:
        return
    text = json.dumps(content, default=str, ensure_ascii=False)
    data = b"\n" + text.encode(errors="replace") + b"\n"
    try:
        # A write of up to PIPE_BUF bytes is atomic, and does not block after a successful poll.
        poll = select.poll()
        poll.register(line.fd, select.POLLOUT)
        if len(data) <= select.PIPE_BUF and poll.poll(0):
            os.write(line.fd, data)
    except (OSError, ValueError):  # the launcher has ended, or the program closed the pipe
        return


def progress(step: int, total: int | None = None, **values: float | str) -> None:
    """Report the progress of this rank to the launcher, for `dure run --page` and its summary.

    Does nothing without a launcher. At most ten calls per second are sent; the last one
    (`step == total`) is always sent.

    Args:
        step: The number of the finished step.
        total: The number of steps, if it is known.
        values: A few short values to show, such as `loss=0.31`.

    Cost:
        0.5 us; 15 us for a call that is sent.

    Example:
        ```python
        for step in range(1, 4):
            dist.progress(step, total=3, loss=0.31)
        ```
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
    _send({"progress": {"step": step, "total": total, "values": shown}})


def last_operation() -> str:
    """Describe this process's last operation, its call site and state; empty if there is none."""
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


def send_last_operation() -> None:
    """Send the description of this process's last operation to the launcher."""
    try:
        text = last_operation()
    except Exception as error:  # a failing report must not end the program
        text = f"unknown ({type(error).__name__})"
    _send({"last": text[:1000]})


def send_elastic() -> None:
    """Report to the launcher that this rank's program recovers by itself when a peer dies.

    Repeated while ranks are missing: the launcher takes each message as a sign of life.
    """
    _send({"elastic": True})


@contextlib.contextmanager
def waiting_for_group() -> Generator[None]:
    """While the block runs, report "waiting for a new group" as this rank's last operation."""
    global _waits_for_group
    _waits_for_group = True
    try:
        yield
    finally:
        _waits_for_group = False


def answer_launcher() -> None:
    """From now on, send the last operation whenever the launcher asks for the stack."""
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
        signal.signal(int(line.record_signal), _asked_for_record)
    except (OSError, ValueError, RuntimeError):  # the program closed the pipe
        return
    _answering = line.pid
    _send({"answers": True})


def _asked(number: int, frame: FrameType | None) -> None:
    del number, frame
    send_last_operation()


def _asked_for_record(number: int, frame: FrameType | None) -> None:
    del number, frame
    flight.on_hang()
