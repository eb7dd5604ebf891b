"""Events: the one seam at which recorder, timeline, desync check and fault injection attach.

An *event* describes one operation of one rank: which group, which number in it, what was called,
how many bytes, when it began and ended, and how. A process group emits one event at the start of
an operation and one at its end, both to the *hooks*, and knows nothing of who listens:

    if trace.hooks:                                  # the one branch paid when nobody does
        with trace.span(trace.Event(group=..., op="all_reduce", ...)):
            backend.all_reduce(...)

`hooks` is a list that is changed in place, so that the test above is one look at its length.
It belongs to the process: ranks that are threads share it, and events carry their rank.
A `before` hook may raise: the operation is then not started, and the caller sees the exception.
That is how faults are injected.

For an asynchronous operation `begin` is called with the call, `end` when its `Work` settles.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum

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


class State(Enum):
    """How far an operation has come."""

    STARTED = "started"
    """It was called, and has not ended."""
    SUCCEEDED = "succeeded"
    """It ended, and its results are in place."""
    FAILED = "failed"
    """It ended with an error, whose type is in `Event.error`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One operation of one rank.

    Attributes:
        group: Name of the process group.
        op: The operation, such as "all_reduce".
        seq: The operation's number in its group, or -1 where operations are not numbered.
        rank: The rank within `group` that called.
        global_rank: The same rank's number in the whole job.
        world_size: Ranks of `group`.
        nbytes: Bytes of this rank's input; of its output where it has no input.
        dtype: Name of the element type, such as "float32"; empty where nothing is moved.
        peer: The root of a rooted collective, or the peer of a point-to-point operation.
        async_op: The caller went on before the operation ended.
        start_ns: When it was called, on `time.monotonic_ns`.
        end_ns: When it ended on the same clock; 0 while it has not.
        state: How far it has come.
        error: Name of the error's type, of an operation that failed.
    """

    group: str
    op: str
    seq: int = -1
    rank: int = 0
    global_rank: int = 0
    world_size: int = 1
    nbytes: int = 0
    dtype: str = ""
    peer: int | None = None
    async_op: bool = False
    start_ns: int = 0
    end_ns: int = 0
    state: State = State.STARTED
    error: str = ""

    @property
    def duration_ns(self) -> int:
        """Nanoseconds from call to end; 0 while the operation has not ended."""
        return max(0, self.end_ns - self.start_ns) if self.end_ns else 0


EventHook = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hook:
    """Two functions that are called around every operation; either may be None.

    Hooks run on the thread that called (or settled) the operation: they must be quick, must not
    communicate, and may be called from several threads at once.
    """

    before: EventHook | None = None
    after: EventHook | None = None


hooks: list[Hook] = []
"""Who listens; changed only by `add_hook` and `remove_hook`."""

_lock = threading.Lock()


def add_hook(*, before: EventHook | None = None, after: EventHook | None = None) -> Hook:
    """Call `before` as each operation starts and `after` as it ends, in this process, from now on.

    Returns:
        The handle for `remove_hook`.
    """
    hook = Hook(before=before, after=after)
    with _lock:
        hooks.append(hook)
    return hook


def remove_hook(hook: Hook) -> None:
    """Stop calling `hook`; nothing happens where it was removed before."""
    with _lock:
        if hook in hooks:
            hooks.remove(hook)


def begin(event: Event) -> Event:
    """Stamp `event` with the time, show it to the `before` hooks, and return it for `end`."""
    event = replace(event, start_ns=time.monotonic_ns())
    for hook in tuple(hooks):
        if hook.before is not None:
            hook.before(event)
    return event


def end(event: Event, error: BaseException | None = None) -> Event:
    """Show the end of `event` to the `after` hooks, the last added first."""
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
    """Emit `event` around a block; an exception of the block is recorded and goes on."""
    event = begin(event)
    try:
        yield event
    except BaseException as error:
        end(event, error)
        raise
    end(event)


class Ring:
    """The last `capacity` events, oldest first. Its `append` can be given to `add_hook`.

    Threads: every method may be called from any thread.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._num_seen = 0
        self._lock = threading.Lock()

    @property
    def num_seen(self) -> int:
        """How many events were ever appended; those beyond the capacity are gone."""
        return self._num_seen

    def append(self, event: Event) -> None:
        """Keep `event`; the oldest one goes where the ring is full."""
        with self._lock:
            self._events.append(event)
            self._num_seen += 1

    def snapshot(self) -> list[Event]:
        """Return the kept events, oldest first."""
        with self._lock:
            return list(self._events)

    def clear(self) -> None:
        """Forget the kept events."""
        with self._lock:
            self._events.clear()
