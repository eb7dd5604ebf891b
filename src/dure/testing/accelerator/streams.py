"""Streams whose work runs when something waits for it.

Work is queued, and runs in the order of its stream when the host, or another stream's work, waits
for it. A seed draws the work that runs next:

* without a seed, only what a wait needs: work is as late as it can be;
* with one, other streams' work may run before it, and work may run as soon as it is queued.

Each order is one that a real device may choose. Events are places in a stream's queue.
"""

from __future__ import annotations

import itertools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore

__all__ = [
    "Event",
    "Stream",
    "current_stream",
    "default_stream",
    "draw_order",
    "synchronize_all",
    "use_stream",
]

_EARLY = 0.4
"""With a seed: how likely another piece of work runs before the one that is queued or needed."""
_DEVICE_TYPE = 20
"""Of PrivateUse1, among torch's numbers of device types."""

_lock = threading.RLock()
_numbers = itertools.count()
_threads = threading.local()
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
_pending: dict[Stream, None] = {}
"""Streams with work that has not run, in the order in which they got it."""
_order: random.Random | None = None


class _Work(NamedTuple):
    """One piece of work: what to run, and the place in another stream that must be reached."""

    run: Callable[[], object] | None
    stream: Stream | None = None
    place: int = 0

    @property
    def is_ready(self) -> bool:
        return self.stream is None or self.stream.num_run >= self.place


class _FreedMemory(NamedTuple):
    """Freed memory: the function that overwrites it, and the places that must be reached before."""

    overwrite: Callable[[], object]
    places: tuple[tuple[Stream, int], ...]


class Event:
    """A place in a stream's queue; without one, until `record`, it counts as reached.

    Args:
        device, enable_timing, blocking, interprocess: As torch's; they have no effect.
    """

    def __init__(
        self,
        device: object = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        self._stream: Stream | None = None
        self._place = 0

    def record(self, stream: Stream | None = None) -> None:
        """Take the place after the work that `stream`, or the current one, has now."""
        self._stream = stream or current_stream()
        self._place = self._stream.num_queued

    def wait(self, stream: Stream | None = None) -> None:
        """Let later work of `stream`, or of the current one, run after this place."""
        if self._stream is not None:
            (stream or current_stream()).add(None, self._stream, self._place)

    def query(self) -> bool:
        """Return whether the place was reached."""
        return self._stream is None or self._stream.num_run >= self._place

    def synchronize(self) -> None:
        """Block the host until the place is reached."""
        if self._stream is not None:
            self._stream.run_to(self._place)


class Stream(torch.Stream):
    """Work that runs in order, when it is waited for.

    Args:
        device, priority: As torch's; they have no effect.

    Attributes:
        num_queued: How many pieces of work it was given.
        num_run: How many of them have run.
    """

    num_queued: int
    num_run: int

    def __new__(cls, device: object = None, priority: int = 0) -> Stream:  # noqa: D102
        ids: Any = {"stream_id": next(_numbers), "device_index": 0, "device_type": _DEVICE_TYPE}
        return super().__new__(cls, **ids)

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.num_queued = self.num_run = 0
        self._queue: deque[_Work] = deque()
        self._freed: deque[_FreedMemory] = deque()
        _streams[self.stream_id] = self

    def add(
        self, run: Callable[[], object] | None, after: Stream | None = None, place: int = 0
    ) -> None:
        """Queue work; it runs after the place in `after`, if one is given."""
        with _lock:
            self._append(_Work(run, after, place))
            if _order is not None:
                _run_some(_order)

    def _append(self, work: _Work) -> None:
        self._queue.append(work)
        self.num_queued += 1
        _pending[self] = None

    def free(self, overwrite: Callable[[], object], used_in: Iterable[Stream]) -> None:
        """Have freed memory overwritten when this stream allocates next.

        After what the streams `used_in` have now. Takes no lock: an object may be collected
        anywhere.
        """
        places = tuple((stream, stream.num_queued) for stream in used_in)
        self._freed.append(_FreedMemory(overwrite, places))

    def allocate(self) -> None:
        """Overwrite what was freed, as if it were given to a tensor that is allocated now."""
        with _lock:
            while self._freed:
                freed = self._freed.popleft()
                for stream, place in freed.places:
                    self._append(_Work(None, stream, place))
                self._append(_Work(freed.overwrite))

    @property
    def is_ready(self) -> bool:
        """Whether its next work may run."""
        return bool(self._queue) and self._queue[0].is_ready

    def needed(self) -> Stream:
        """Return the stream whose work must run next so that this one's can."""
        stream = self
        while not stream._queue[0].is_ready:
            after = stream._queue[0].stream
            assert after is not None
            stream = after
        return stream

    def run_next(self) -> None:
        """Run one piece of work."""
        work = self._queue.popleft()
        if not self._queue:
            del _pending[self]
        try:
            if work.run is not None:
                work.run()
        finally:
            self.num_run += 1

    def run_to(self, place: int) -> None:
        """Run work of this stream, and what it waits for, until `place` is reached."""
        with _lock, _outside_of_the_program():
            while self.num_run < place:
                stream = self.needed()
                if _order is not None and _order.random() < _EARLY:
                    stream = _order.choice(_ready())
                stream.run_next()

    # ---------------------------------------------------------------- as torch.cuda.Stream

    def record_event(self, event: Any = None) -> Any:
        """Record `event`, or a new one, after the work that it has now; return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Let later work run after an event."""
        event.wait(self)

    def wait_stream(self, other: Any) -> None:
        """Let later work run after the work that another stream has now."""
        self.add(None, other, other.num_queued)

    def query(self) -> bool:
        """Return whether all its work has run."""
        return self.num_run >= self.num_queued

    def synchronize(self) -> None:
        """Block the host until all its work has run."""
        self.run_to(self.num_queued)

    def __enter__(self) -> Stream:
        stack: list[Stream] = _threads.__dict__.setdefault("stack", [])
        stack.append(current_stream())
        _threads.stream = self
        return self

    def __exit__(self, *error: object) -> None:
        _threads.stream = _threads.stack.pop()

    def __repr__(self) -> str:
        return f"<Stream {self.stream_id}: {self.num_run} of {self.num_queued} have run>"


def _ready() -> list[Stream]:
    return [stream for stream in _pending if stream.is_ready]


def _run_some(order: random.Random) -> None:
    """Run work early: some, none, or all that may run."""
    with _outside_of_the_program():
        while order.random() < _EARLY and (ready := _ready()):
            order.choice(ready).run_next()


@contextmanager
def _outside_of_the_program() -> Iterator[None]:
    """Run work without the modes that the program has at the place that waits for it."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(torch._C.DisableTorchFunction())  # pyright: ignore
        stack.enter_context(_disable_current_modes())
        yield


_default = Stream()


def default_stream() -> Stream:
    """Return the stream that is current where a thread has chosen none: one for all threads."""
    return _default


def current_stream() -> Stream:
    """Return the stream that the calling thread queues work in."""
    return getattr(_threads, "stream", _default)


def use_stream(stream: Stream) -> None:
    """Let the calling thread queue work in `stream`."""
    _threads.stream = stream


def stream_of(number: int) -> Stream:
    """Return the stream that has an id."""
    return _streams[number]


def synchronize_all() -> None:
    """Block the host until all work of all streams has run."""
    with _lock, _outside_of_the_program():
        while _pending:
            stream = next(iter(_pending)).needed()
            if _order is not None:
                stream = _order.choice(_ready())
            stream.run_next()


def draw_order(seed: int | None) -> None:
    """Choose the order in which work runs; see the module's text."""
    global _order
    _order = None if seed is None else random.Random(seed)
