"""Being asked to end: SIGTERM becomes a note that the program reads between two steps.

A cluster that takes a machine back sends SIGTERM (Slurm with --signal: SIGUSR1 beforehand) and
kills some time later. The signal comes at any moment and to each rank at another one, so the
handler only notes it. Ranks learn of it together, at the end of a step: through the commit's
all_reduce in `dure.elastic.run`, or, in any other program, in `preempted()`. Then the callbacks
run on all ranks at the same step, so they may save a checkpoint together.

A second SIGTERM, two seconds or more after the first, ends the process at once, as if no handler
had been installed. Earlier ones are the same request: systemd and some batch systems signal every
process of a job, and the launcher passes its signal on. A handler that the program had before is
called as well, once for each signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dure import env
from dure.comm.ops import ReduceOp
from dure.comm.world import current_world
from dure.errors import UsageError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = [
    "EXIT_CODE",
    "asked",
    "forget",
    "on_preempt",
    "preempted",
    "run_callbacks",
    "watch",
    "watching",
]

EXIT_CODE = 128 + signal.SIGTERM
"""What a rank exits with after it was asked to end, and has done what was to do: 143."""

_ONE_REQUEST_S = 2.0

F = TypeVar("F", bound=Callable[[], object])


class _Notes:
    def __init__(self) -> None:
        self.number: int | None = None
        self.one_request_until = 0.0
        self.pid = 0  # who catches them: a process that it forks has handlers, too
        self.before: dict[int, Any] = {}  # the handlers that were there
        self.handled = False
        self.callbacks: list[Callable[[], object]] = []


_notes = _Notes()


def on_preempt(callback: F) -> F:
    """Call `callback` when the job is asked to end, at the end of a step, on all ranks.

    Args:
        callback: Takes nothing. It may communicate, for all ranks call it after the same step:
            `lambda: checkpointer.save(...)`.

    Returns:
        `callback`, so this may be used as a decorator.

    Raises:
        UsageError: This is not the main thread, which alone may catch signals.

    Example:
        ```python
        from dure import elastic

        @elastic.on_preempt
        def save():
            print("all ranks are here, after the same step")
        ```
    """
    watch()
    _notes.callbacks.append(callback)
    return callback


def preempted(group: ProcessGroup | None = None) -> bool:
    """Return whether any rank was asked to end; the first time so, run the callbacks.

    For programs that do without `dure.elastic.run`:

        for batch in loader:
            ...
            if dure.elastic.preempted():
                break

    Args:
        group: Whose ranks; the default group where None, or this process alone without any.

    Collective:
        All ranks of the group call, each after the same step.

    Cost:
        An all_reduce of 8 bytes.

    Example:
        ```python
        assert not elastic.preempted()  # no rank was sent SIGTERM
        ```
    """
    watch()
    was_asked = asked()
    pg = group or current_world().default
    if pg is not None and pg.size() > 1:
        flag = torch.tensor([int(was_asked)], device=pg.message_device)
        pg.all_reduce(flag, ReduceOp.MAX)
        was_asked = bool(flag.item())
    if was_asked and not _notes.handled:
        _notes.handled = True
        run_callbacks()
    return was_asked


def watch() -> None:
    """Catch the signals that ask to end, from now on."""
    if _notes.before:
        return
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "only the main thread can catch SIGTERM",
            op="on_preempt",
            seen=f"called on thread {threading.current_thread().name!r}",
            fix="Call it on the main thread, before others are started.",
        )
    numbers = [signal.SIGTERM]
    if env.text("SLURM_JOB_ID") is not None:
        numbers.append(signal.SIGUSR1)
    _notes.pid = os.getpid()
    for number in numbers:
        _notes.before[number] = signal.signal(number, _note)


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Catch the signals for the length of a `with` block, or longer if the program wants that."""
    mine = not _notes.before and threading.current_thread() is threading.main_thread()
    if mine:
        watch()
    try:
        yield
    finally:
        if mine and not _notes.callbacks:
            forget()


def asked() -> bool:
    return _notes.number is not None


def run_callbacks() -> None:
    for callback in _notes.callbacks:
        callback()


def forget() -> None:
    """Be as a process that was never asked to end, and watches for nothing."""
    for number, handler in _notes.before.items():
        signal.signal(number, handler)
    _notes.__init__()


def _note(number: int, frame: FrameType | None) -> None:
    before, now = _notes.before.get(number), time.monotonic()
    later = number == signal.SIGTERM == _notes.number and now >= _notes.one_request_until
    if (later and not callable(before)) or os.getpid() != _notes.pid:  # a loader's worker ends
        signal.signal(number, before or signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    if number != _notes.number:
        _notes.one_request_until = now + _ONE_REQUEST_S
    _notes.number = number
    if callable(before):
        before(number, frame)
