"""Streams whose work runs when something waits for it.

Work is queued, and runs in the order of its stream when the host, or another stream's work, waits
for it. A seed draws the work that runs next:

* without a seed, only what a wait needs: work is as late as it can be;
* with one, other streams' work may run before it, and work may run as soon as it is queued.

Each order is one that a real device may choose. Events are places in a stream's queue.

*Other processes.* Work may wait for other ranks (`Remote`): collectives of the simulated NCCL. It
runs when the host waits for it and they have sent what it needs. They may need something of this
rank in turn, which its queued work sends: that work is *demanded*. It runs

* while the host waits for other ranks, here;
* or while the host waits for something else, as a device continues while the host sleeps: a thread
  notices that the threads that queue work have hardly used a core for a while.

So work is not earlier than some rank's host needs it. Work that waits for other ranks runs early,
with a seed, only if they have sent their part.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from dure import torch_private

__all__ = [
    "Event",
    "Remote",
    "Stream",
    "current_stream",
    "default_stream",
    "draw_order",
    "news",
    "serve_demands_of",
    "synchronize_all",
    "use_stream",
    "wait_for",
]

_EARLY = 0.4
"""With a seed: how likely another piece of work runs before the one that is queued or needed."""
_DEVICE_TYPE = 20
"""Of PrivateUse1, among torch's numbers of device types."""
_LOOK_S = 0.2
"""How often a host that waits for other ranks looks whether they can still come."""
_IDLE_S = 0.03
"""Threads that hardly use a core for so long wait for something."""

news = threading.Condition(threading.RLock())
"""The lock of all streams; notified when other ranks have sent something."""
_numbers = itertools.count()
_threads = threading.local()
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
_pending: dict[Stream, None] = {}
"""Streams with work that has not run, in the order in which they got it."""
_order: random.Random | None = None


class Remote(Protocol):
    """What work needs of other ranks."""

    def has_arrived(self) -> bool:
        """Return whether they have sent it, or never will."""
        ...

    def look(self) -> None:
        """Find out whether they can still send it; called while the host waits."""
        ...


class _Work(NamedTuple):
    """One piece of work: what to run, and what must have happened before.

    The place in another stream is reached, and other ranks have sent something.
    """

    run: Callable[[], object] | None
    stream: Stream | None = None
    place: int = 0
    remote: Remote | None = None

    @property
    def is_reached(self) -> bool:
        return self.stream is None or self.stream.num_run >= self.place

    @property
    def is_ready(self) -> bool:
        return self.is_reached and (self.remote is None or self.remote.has_arrived())


class _FreedMemory(NamedTuple):
    """Freed memory: the function that overwrites it, and the places that must be reached before."""

    overwrite: Callable[[], object]
    places: tuple[tuple[Stream, int], ...]


class Event:
    """A place in a stream's queue; without one, until `record`, it counts as reached.

    Args:
        device, enable_timing, blocking, interprocess: As torch's; they have no effect.

    Example:
        ```python
        from dure.testing import accelerator

        accelerator.install()
        device = torch.get_device_module("sim")
        x = torch.ones(4, device="sim")
        ready = device.Event()
        ready.record()  # on the current stream, after what it was given
        ready.synchronize()
        assert ready.query()
        ```
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

    def advance(self) -> None:
        """Run the work before the place, as far as other ranks have sent what it needs."""
        if self._stream is not None:
            self._stream.advance(self._place)


class Stream(torch.Stream):
    """Work that runs in order, when it is waited for.

    Args:
        device, priority: As torch's; they have no effect.

    Attributes:
        num_queued: How many pieces of work it was given.
        num_run: How many of them have run.

    Example:
        ```python
        side = device.Stream()
        with device.stream(side):
            side.wait_stream(device.current_stream())
            y = x + 1
        side.synchronize()
        ```
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
        self,
        run: Callable[[], object] | None,
        after: Stream | None = None,
        place: int = 0,
        remote: Remote | None = None,
    ) -> None:
        """Queue work; it runs after the place in `after`, and what `remote` says, if given."""
        if not getattr(_threads, "is_known", False):
            _threads.is_known = True
            _hosts.add(threading.get_native_id())
        with news:
            self._append(_Work(run, after, place, remote))
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
        with news:
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
        """Return the stream whose work must run next so that this one's can.

        That work may still wait for other ranks.
        """
        stream = self
        while not stream._queue[0].is_reached:
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
        with news, _outside_of_the_program():
            while self.num_run < place:
                stream = self.needed()
                if _order is not None and _order.random() < _EARLY and (ready := _ready()):
                    stream = _order.choice(ready)
                stream.run_or_wait()
            _raise_failure()

    def run_or_wait(self) -> None:
        """Run one piece of work; if other ranks have not sent what it needs, wait for them."""
        if self.is_ready:
            self.run_next()
        elif not _serve_one():
            self._look()
            if not self.is_ready:
                news.wait(_LOOK_S)

    def _look(self) -> None:
        """Find out whether other ranks can still send what the next work needs."""
        remote = self._queue[0].remote
        assert remote is not None
        remote.look()

    def advance(self, place: int) -> bool:
        """Run work up to `place`, but do not wait for other ranks; return whether it is reached."""
        with news, _outside_of_the_program():
            while self.num_run < place:
                stream = self.needed()
                if not stream.is_ready:
                    stream._look()
                    return False
                stream.run_next()
        return True

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
        stack.enter_context(torch_private.DisableTorchFunction())
        stack.enter_context(torch_private.disable_current_modes())
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
    with news, _outside_of_the_program():
        while _pending:
            stream = next(iter(_pending)).needed()
            if _order is not None and (ready := _ready()):
                stream = _order.choice(ready)
            stream.run_or_wait()
        _raise_failure()


def draw_order(seed: int | None) -> None:
    """Choose the order in which work runs; see the module's text."""
    global _order
    _order = None if seed is None else random.Random(seed)


# ---------------------------------------------------------------- other ranks


class _Demands(Protocol):
    """Work in a stream that other ranks need."""

    stream: Stream

    def demanded_place(self) -> int:
        """Return the place up to which others need the stream's work; 0: nothing."""
        ...


_hosts: set[int] = set()
"""Ids, of the system, of the threads that have queued work."""
_served: weakref.WeakSet[_Demands] = weakref.WeakSet()
_is_serving = False
_failure: list[BaseException] = []
"""An error of work that ran while no host waited; the next wait raises it."""


def serve_demands_of(demands: _Demands) -> None:
    """Run from now on the work that `demands` names."""
    global _is_serving
    with news:
        if not _is_serving:
            threading.Thread(target=_serve_idle_host, name="dure-sim", daemon=True).start()
            _is_serving = True
        _served.add(demands)


def wait_for(remote: Remote) -> None:
    """Block the host until other ranks have sent something."""
    with news, _outside_of_the_program():
        while not remote.has_arrived():
            if not _serve_one():
                remote.look()
                news.wait(_LOOK_S)


def _demanded() -> Stream | None:
    """Return a stream whose next work is demanded, directly or by such work, and may run."""
    for demands in [*_served]:
        if demands.stream.num_run < demands.demanded_place():
            stream = demands.stream.needed()
            if stream.is_ready:
                return stream
    return None


def _serve_one() -> bool:
    """Run one piece of demanded work; return whether there was one."""
    stream = _demanded()
    if stream is not None:
        stream.run_next()
    return stream is not None


def _serve_idle_host() -> None:
    """Run demanded work while the host waits for something else."""
    while True:
        with news:
            while _demanded() is None:
                news.wait()
        if not _host_is_idle():
            continue
        with news, _outside_of_the_program():
            try:
                while _serve_one():
                    pass
            except BaseException as error:
                _failure.append(error)


def _raise_failure() -> None:
    if _failure:
        raise _failure.pop()


def _host_is_idle() -> bool:
    """Return whether, for a while, no thread that queues work has wanted a core.

    A thread that waits may wake now and then.
    """
    with news:
        before = {thread: _core_use_of(thread) for thread in _hosts}
    time.sleep(_IDLE_S)
    used = [_core_use_of(thread) - earlier for thread, earlier in before.items()]
    return all(0 <= seconds < _IDLE_S / 20 for seconds in used)  # not if one of them is infinite


def _core_use_of(thread: int) -> float:
    """Return a thread's core time in seconds; infinite if it runs, or waits for a core."""
    try:
        with open(f"/proc/self/task/{thread}/stat", encoding="ascii") as file:
            if file.read().rpartition(")")[2].split()[0] == "R":
                return math.inf
        with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[0]) * 1e-9
    except OSError:  # it has ended, or this system has no such files
        return 0.0
