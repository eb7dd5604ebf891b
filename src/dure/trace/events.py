"""Events: hooks that are called around every operation of a process group.

An *event* describes one operation of one rank: its group, its number there, the operation, bytes,
start, end and result. A process group passes one event to the *hooks* when an operation starts and
one when it ends:

    if trace.hooks:                                  # the only cost without hooks
        with trace.span(trace.Event(group=..., op="all_reduce", ...)):
            backend.all_reduce(...)

`hooks` is a list that is changed in place, so the test above only reads its length.
It belongs to the process: ranks that are threads share it, and events carry their rank.
A `before` hook may raise: the operation is then not started, and the caller sees the exception.
Tests inject faults this way.

For an asynchronous operation `begin` is called with the call, `end` when its `Work` completes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dure.trace.record import Record, State

__all__ = [
    "Event",
    "Hook",
    "Ring",
    "State",
    "add_hook",
    "begin",
    "end",
    "hooks",
    "remove_hook",
    "span",
]


Event = Record
"""An operation, as hooks get it: a `Record` without call site, reduction and tag."""

EventHook = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hook:
    """Two functions that are called around every operation; either may be None.

    Attributes:
        before: Called with the event as an operation starts; an exception prevents the operation.
        after: Called with the event as an operation ends.

    Threads:
        Hooks run on the thread that calls or completes the operation. They must be quick, must not
        communicate, and may be called from several threads at once.

    Obtained from:
        `add_hook`.
    """

    before: EventHook | None = None
    after: EventHook | None = None


hooks: list[Hook] = []
"""The registered hooks; changed only by `add_hook` and `remove_hook`."""

_lock = threading.Lock()


def add_hook(*, before: EventHook | None = None, after: EventHook | None = None) -> Hook:
    """Call `before` as each operation of this process starts, and `after` as it ends.

    Args:
        before: Gets the event of an operation that starts; if it raises, the operation is not
            started and the caller sees the exception.
        after: Gets the event of an operation that has ended, with its state and times.

    Returns:
        The handle for `remove_hook`.

    Cost:
        The time of the functions, at every operation of the process.

    Example:
        ```python
        from dure import trace

        ops = []
        hook = trace.add_hook(before=lambda event: ops.append(event.op))
        dist.all_reduce(torch.ones(3))
        trace.remove_hook(hook)
        assert ops == ["all_reduce"]
        ```
    """
    hook = Hook(before=before, after=after)
    with _lock:
        hooks.append(hook)
    return hook


def remove_hook(hook: Hook) -> None:
    """Stop calling a hook.

    Args:
        hook: The handle that `add_hook` returned; a hook that was removed before is ignored.

    Example:
        ```python
        ops = []
        hook = trace.add_hook(after=lambda event: ops.append(event.op))
        trace.remove_hook(hook)
        dist.barrier()
        assert ops == []
        ```
    """
    with _lock:
        if hook in hooks:
            hooks.remove(hook)


def begin(event: Event) -> Event:
    """Set the start time of an event and pass it to the `before` hooks.

    Args:
        event: The operation that starts.

    Returns:
        The event with its start time, for `end`.

    Raises:
        Exception: A `before` hook raised.

    Example:
        ```python
        event = trace.Event(group="mine", op="load", rank=0, world_size=1)
        event = trace.begin(event)
        assert event.start_ns > 0
        ```
    """
    event = replace(event, start_ns=time.monotonic_ns())
    for hook in tuple(hooks):
        if hook.before is not None:
            hook.before(event)
    return event


def end(event: Event, error: BaseException | None = None) -> Event:
    """Set the end time and state of an event, and pass it to the `after` hooks, the last one first.

    Args:
        event: What `begin` returned.
        error: The exception that the operation raised, or None.

    Returns:
        The event with its end.

    Example:
        ```python
        assert trace.end(event).state is trace.State.SUCCEEDED
        ```
    """
    event = replace(
        event,
        end_ns=time.monotonic_ns(),
        state=State.SUCCEEDED if error is None else State.FAILED,
        error="" if error is None else type(error).__name__,
    )
    for hook in reversed(tuple(hooks)):
        if hook.after is not None:
            hook.after(event)
    return event


@contextmanager
def span(event: Event) -> Generator[Event]:
    """Emit an event around a block; an exception of the block is recorded and raised again.

    Args:
        event: The operation that the block runs.

    Yields:
        The event with its start time.

    Example:
        ```python
        ring = trace.Ring()
        hook = trace.add_hook(after=ring.append)
        with trace.span(trace.Event(group="mine", op="load")):
            torch.ones(3).sum()  # what is measured
        trace.remove_hook(hook)
        assert [event.op for event in ring.snapshot()] == ["load"]
        ```
    """
    event = begin(event)
    try:
        yield event
    except BaseException as error:
        end(event, error)
        raise
    end(event)


class Ring:
    """The last events, for a hook: `add_hook(after=ring.append)`.

    Args:
        capacity: How many events are kept; older ones are dropped.

    Threads:
        Every method may be called from any thread.

    Example:
        ```python
        ring = trace.Ring(capacity=2)
        hook = trace.add_hook(after=ring.append)
        for _ in range(3):
            dist.barrier()
        trace.remove_hook(hook)
        assert len(ring.snapshot()) == 2 and ring.num_seen == 3
        ```
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._num_seen = 0
        self._lock = threading.Lock()

    @property
    def num_seen(self) -> int:
        """How many events were appended, including dropped ones."""
        return self._num_seen

    def append(self, event: Event) -> None:
        """Keep an event, and drop the oldest one if the ring is full.

        Args:
            event: The event.
        """
        with self._lock:
            self._events.append(event)
            self._num_seen += 1

    def snapshot(self) -> list[Event]:
        """Return the kept events, oldest first."""
        with self._lock:
            return list(self._events)

    def clear(self) -> None:
        """Drop the kept events."""
        with self._lock:
            self._events.clear()
