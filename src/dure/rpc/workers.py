"""The threads that receive messages and run the calls of others.

All of them wait for the inbox's next message (`csrc/core/inbox.h`), and the thread that receives a
call runs it, so that a call changes threads only if it must wait. One thread always receives:
before a thread runs a call, it makes sure that another waits for messages. Other messages are
handled at once, because they are short.

At most `slots` calls run at a time; others wait in a queue. A thread that waits for a remote call
within a call gives its slot to another call (`step_aside`), so that calls may call back in any
depth; no other call runs on its stack in that time. Completing a future needs no slot, because a
call may wait for it in torch, without giving its slot away. There is a limit on threads, too: if it
is reached, calls wait in the queue.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from dure.native import Inbox
from dure.rpc.message import Completion, Work
from dure.trace import logs

__all__ = ["MOST_THREADS", "Workers"]

MOST_THREADS = 512

_IDLE_S = 5.0
"""How long an unneeded thread waits for a message before it ends."""

_KEPT = 2
"""How many threads wait for messages at all times: one, and its successor."""

_log = logs.logger("rpc")


class _WorkerThread(threading.local):
    """Whether the calling thread runs a call, and has a slot for it."""

    runs = has_slot = False


class Workers:
    """The threads of one process.

    Args:
        inbox: Receives messages.
        handle: Handles a message and returns None, or returns the call to run.
        slots: How many calls run at a time.
    """

    def __init__(
        self,
        inbox: Inbox,
        handle: Callable[[bytes], Work | None],
        slots: int,
    ) -> None:
        self._inbox, self._handle, self._slots = inbox, handle, slots
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._queue: deque[Work] = deque()
        self._completions: deque[Work] = deque()
        self._running = self._receiving = self._threads = 0
        self._here = _WorkerThread()
        self._closed = False

    def start(self) -> None:
        """Start to receive."""
        with self._lock:
            self._keep_receiving()

    def submit(self, call: Work) -> None:
        """Run a call that a thread of the program, or of the sockets, has received."""
        with self._lock:
            self._put(call)
        self._inbox.post(b"")  # wakes a thread, which checks the queue

    def step_aside(self) -> bool:
        """Give the slot of the calling thread's call to another call, while it waits.

        Returns:
            Whether it had a slot; then it must call `step_back`.
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
        """Continue with the call at once, even if that exceeds the number of slots for a while."""
        with self._lock:
            self._running += 1
        self._here.has_slot = True

    def close(self) -> None:
        """End all threads that run no call; returns at once."""
        with self._lock:
            self._closed = True
        self._inbox.close()

    def join(self, seconds: float | None = None) -> None:
        """After `close`: wait until all other threads have ended, for at most `seconds`."""
        with self._lock:
            self._ended.wait_for(lambda: self._threads == self._here.runs, seconds)
        while self._completions:
            self._completions.popleft()()

    # --- the threads -------------------------------------------------------------------------

    def _keep_receiving(self) -> None:
        """With the lock: start threads, so that enough of them receive."""
        while not self._closed and self._receiving < _KEPT and self._threads < MOST_THREADS:
            self._threads += 1
            self._receiving += 1
            name = f"dure-rpc-{self._threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        torch.get_num_threads()  # applies `torch.set_num_threads` to this thread
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
        call = self._handle(message) if message else None
        with self._lock:
            if call is not None:
                self._put(call)
            call = self._next()
            if call is None:
                return
            self._receiving -= 1
            if self._receiving < _KEPT:
                self._keep_receiving()
        self._here.runs = True
        while call is not None:
            try:
                call()
            except BaseException:  # also SystemExit, which unpickling a value may raise
                _log.exception("a call could not be answered")
            with self._lock:
                self._running -= self._here.has_slot
                self._here.has_slot = False
                call = self._next() if self._queue or self._completions else None
                if call is None:
                    self._receiving += 1
        self._here.runs = False

    def _put(self, call: Work) -> None:
        (self._completions if isinstance(call, Completion) else self._queue).append(call)

    def _next(self) -> Work | None:
        """With the lock: return work that can run, with a slot for it if it needs one."""
        if self._completions:
            return self._completions.popleft()
        if not self._queue or self._running >= self._slots:
            return None
        self._running += 1
        self._here.has_slot = True
        return self._queue.popleft()
