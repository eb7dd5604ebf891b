"""The threads that receive messages, and run what others call.

All of them ask the inbox for the next message (`csrc/core/inbox.h`), and whoever gets a call runs
it, so that a call is handed from thread to thread only when it must wait. There is always one that
receives: before a thread runs a call it sees to it that another waits for messages. Messages that
are no calls are short, and are dealt with at once.

At most `slots` calls run at a time; others wait in a queue. A thread that waits within a call for
something remote gives its slot to another (`step_aside`), so that calls may call back in any depth;
the program's stack is its own meanwhile: no other call runs on it. What completes a future needs no
slot, for a call may wait for it in torch's way, which gives none away. The number of threads is
bounded all the same.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from dure.errors import RpcError
from dure.native import Inbox
from dure.rpc.envelope import Completion, Work
from dure.trace import logs

__all__ = ["MOST_THREADS", "Workers"]

MOST_THREADS = 512

_IDLE_S = 5.0
"""How long a thread that is not needed waits for a message before it ends."""

_KEPT = 2
"""How many wait for messages at all times: one, and one to follow it."""

_log = logs.logger("rpc")


class _Here(threading.local):
    """What the calling thread does: `runs` a call; `has_slot` for it."""

    runs = has_slot = False


class Workers:
    """The threads of one process.

    Args:
        inbox: Where messages come.
        sort: Deals with a message at once, and returns None; or returns the call that it is.
        slots: How many calls run at a time.
    """

    def __init__(
        self,
        inbox: Inbox,
        sort: Callable[[bytes], Work | None],
        slots: int,
    ) -> None:
        self._inbox, self._sort, self._slots = inbox, sort, slots
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._queue: deque[Work] = deque()
        self._completions: deque[Work] = deque()
        self._running = self._receiving = self._threads = 0
        self._here = _Here()
        self._closed = False

    def start(self) -> None:
        """Begin to receive."""
        with self._lock:
            self._keep_receiving()

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many calls run, how many wait, and how many threads there are."""
        with self._lock:
            return self._running, len(self._queue), self._threads

    @property
    def inside(self) -> bool:
        """Whether the calling thread runs a call."""
        return self._here.runs

    def submit(self, call: Work) -> None:
        """Run a call that another thread than these has received."""
        with self._lock:
            self._put(call)
        self._inbox.post(b"")  # somebody without a ticket looks into the queue

    def step_aside(self) -> bool:
        """Let another call run in place of that of the calling thread; whether it runs one.

        If so, it must `step_back`.
        """
        if not self._here.has_slot:
            return False
        self._here.has_slot = False
        with self._lock:
            self._running -= 1
            more = bool(self._queue)
        if more:
            self._inbox.post(b"")
        return True

    def step_back(self) -> None:
        """Go on with the call, at once, be it one too many: who waits longest goes on."""
        with self._lock:
            self._running += 1
        self._here.has_slot = True

    def close(self) -> None:
        """End all threads that run no call; returns at once."""
        with self._lock:
            self._closed = True
        self._inbox.close()

    def join(self, seconds: float | None = None) -> None:
        """After `close`: wait until the threads have ended; if this is one of them, all others.

        Those that still run a call after that time are left to themselves.
        """
        with self._lock:
            self._ended.wait_for(lambda: self._threads == self.inside, seconds)
        while self._completions:
            self._completions.popleft()()

    # --- the threads -------------------------------------------------------------------------

    def _keep_receiving(self) -> None:
        """With the lock: start threads, so that there are some that receive."""
        while not self._closed and self._receiving < _KEPT and self._threads < MOST_THREADS:
            self._threads += 1
            self._receiving += 1
            name = f"dure-rpc-{self._threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        torch.get_num_threads()  # from here on, what the program has set holds in this thread, too
        while True:
            message = self._inbox.next(None, _IDLE_S)
            if message is False or (message is None and self._is_too_many()):
                break
            if type(message) is bytes:
                self._take(message)
        with self._lock:
            self._receiving -= 1
            self._threads -= 1
            self._ended.notify_all()

    def _is_too_many(self) -> bool:
        with self._lock:
            return self._receiving > _KEPT

    def _take(self, message: bytes) -> None:
        call = self._sort(message) if message else None
        with self._lock:
            if call is not None:
                self._put(call)
            call = self._next()
            if call is None:
                return
            self._receiving -= 1
            if self._receiving < _KEPT:
                self._keep_receiving()
            alone = self._receiving == 0
        self._here.runs = True
        while call is not None:
            try:
                call(*([_too_many()] if alone else []))
            except BaseException:  # SystemExit, too, which a value may raise where it is unpickled
                _log.exception("a call could not be answered")
            with self._lock:
                self._running -= self._here.has_slot
                self._here.has_slot = False
                call = self._next() if self._queue or self._completions else None
                if call is None:
                    self._receiving += 1
        self._here.runs = False

    def _put(self, call: Work) -> None:
        (self._completions if type(call) is Completion else self._queue).append(call)

    def _next(self) -> Work | None:
        """With the lock: return what can run, with a slot for it if it needs one."""
        if self._completions:
            return self._completions.popleft()
        if not self._queue or self._running >= self._slots:
            return None
        self._running += 1
        self._here.has_slot = True
        return self._queue.popleft()


def _too_many() -> RpcError:
    return RpcError(
        "too many calls wait for other calls",
        seen=f"{MOST_THREADS} threads of this process",
        fix="Return a future instead of waiting (rpc.functions.async_execution).",
    )
