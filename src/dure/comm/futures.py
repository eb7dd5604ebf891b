"""Futures of `Work`: they are set by a helper thread, or by the thread that waits for the value.

By default a future is set by a thread that waits for the operation (`Waiters`): callbacks run as
soon as it ends. A callback may wait for another future, so there are as many threads as pending
futures; they are reused.

Threads run in any order, but collectives need one order: two callbacks that each start a collective
could run in different orders on two ranks. Therefore no threads are used inside `driven()`:
`Work.get_future` returns a `Later`, which is set by the first thread that waits for it, or for a
future that was chained to it with `then`; the callbacks run on that thread. If all ranks wait for
these futures in the same order, their collectives have the same order, too.

The operation itself runs in the background in both cases; only the callbacks are delayed.

gevent and eventlet replace threads, locks and queues by those of their own loop, which does not run
while such a future is waited for in C++. So futures are set by threads of the system, which use a
start function and a queue that these libraries do not replace.
"""

from __future__ import annotations

import _thread
import os
import threading
from _queue import Empty, SimpleQueue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

_IDLE_S = 10.0


class Waiters:
    """Threads that run jobs at once: as many as there are jobs at a time, and reused.

    Args:
        name: Name of the threads.

    Threads:
        `run` and `close` may be called from any thread. The threads are daemons, and end after ten
        seconds without work or when closed.
    """

    def __init__(self, name: str = "dure-future") -> None:
        self._name = name
        self.renew()

    def renew(self) -> None:
        """Forget all threads, in a forked child, which does not have them."""
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._idle = deque[None]()  # an entry for each thread that no job has reserved

    def run(self, job: Callable[[], object]) -> None:
        """Run `job` on a separate thread."""
        if not self._take_idle():
            # The job is not an argument, which the thread would keep as long as it lives.
            _start_thread(self._serve, self._name)
        self._jobs.put(job)

    def _take_idle(self) -> bool:
        """Reserve an idle thread; return False if there is none."""
        with suppress(IndexError):
            self._idle.pop()
            return True
        return False

    def _serve(self) -> None:
        job = self._jobs.get()
        while job is not None:
            job()
            del job  # otherwise an idle thread would keep its tensors
            self._idle.append(None)
            job = self._next()

    def _next(self) -> Callable[[], object] | None:
        with suppress(Empty):
            return self._jobs.get(timeout=_IDLE_S)
        if self._take_idle():
            return None
        return self._jobs.get()  # a job has reserved this thread in the meantime

    def close(self) -> None:
        """End the threads that are idle; the others end with their jobs, some seconds later."""
        while self._take_idle():
            self._jobs.put(None)


def starts_threads() -> bool:
    """Return whether `threading` starts threads of the system, which gevent and eventlet change.

    Debuggers replace the function too, and start such threads.
    """
    made_by = getattr(_thread.start_new_thread, "__module__", None) or ""
    return made_by.partition(".")[0] not in ("gevent", "eventlet")


def _start_thread(run: Callable[[], None], name: str) -> None:
    """Start a thread of the system, also if `threading` was changed."""
    if starts_threads():
        threading.Thread(target=run, name=name, daemon=True).start()
    else:
        _thread.start_new(run, ())


class Later(torch.futures.Future[Any]):
    """A future that is set by the first thread that waits for it, or for a future chained to it.

    Args:
        run: Makes the value, once; every `wait` raises its exception.
        ready: Returns whether `run` would not block.
        devices: Of the tensors in the value, those that are not the CPU.

    Threads:
        One at a time waits for a future and for those chained to it.
    """

    def __init__(
        self,
        run: Callable[[], Any],
        ready: Callable[[], bool] | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        super().__init__(devices=list(devices))
        self._run: Callable[[], Any] | None = run
        self._ready, self._devices = ready, devices
        self._followers: list[Later] = []

    def drive(self) -> None:
        """Set this future and those chained to it, unless they are set; errors stay in them."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            value = run()
        except Exception as error:
            self.set_exception(error)  # pyright: ignore[reportArgumentType]
        else:
            self.set_result(value)
        followers, self._followers = self._followers, []
        for follower in followers:
            follower.drive()

    def wait(self) -> Any:
        """Block until the value is available; return it, or raise its error."""
        self.drive()
        return super().wait()

    def value(self) -> Any:
        """Return the value, as `wait` does."""
        return self.wait()

    def done(self) -> bool:
        """Return whether the value is available, or can be made without blocking."""
        if self._run is not None and self._ready is not None and self._ready():
            self.drive()
        return super().done()

    def then(self, callback: Callable[[Any], Any]) -> Later:  # pyright: ignore
        """Return a future of `callback(self)`, which runs when this one is set."""

        def run() -> Any:
            self.drive()
            return callback(self)

        follower = Later(run, self.done, self._devices)
        if self._run is None:
            follower.drive()
        else:
            self._followers.append(follower)
        return follower


class _Driven(threading.local):
    """The futures of the calling thread; None outside `driven`."""

    futures: list[Later] | None = None


_driven = _Driven()


@contextmanager
def driven() -> Iterator[list[Later]]:
    """Let `Work.get_future` return `Later` futures on this thread; yields the list of them."""
    before, made = _driven.futures, list[Later]()
    _driven.futures = made
    try:
        yield made
    finally:
        _driven.futures = before


def collected(make: Callable[[], Later]) -> Later | None:
    """Return `make()` and add it to the list of `driven`; return None outside of it."""
    if _driven.futures is None:
        return None
    future = make()
    _driven.futures.append(future)
    return future


waiters = Waiters()
"""The process's: threads belong to the process, not to a rank of it."""
os.register_at_fork(after_in_child=waiters.renew)
