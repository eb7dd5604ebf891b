"""One thread for what is due at some time, and for what must not be done where it comes up."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

__all__ = ["Timers"]

_log = logging.getLogger("dure.rpc")


class Timers:
    """The thread, and the times."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._open = True
        self._thread = threading.Thread(target=self._work, name="dure-rpc-timers", daemon=True)
        self._thread.start()

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Have something done at a time of `time.monotonic`."""
        number = next(self._order)
        with self._lock:
            heapq.heappush(self._heap, (when, number, action))
            first = self._heap[0][1] == number
        if first:
            self._queue.put(None)

    def soon(self, action: Callable[[], None]) -> None:
        """Have something done by the thread. May be called from finalizers: takes no lock."""
        self._queue.put(action)

    def close(self) -> None:
        """End, when what was asked for `soon` is done."""
        self._open = False
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while self._open or not self._queue.empty():
            with self._lock:
                left = self._heap[0][0] - time.monotonic() if self._heap else None
            if left is not None and left <= 0.0:
                action = self._due()
            else:
                try:
                    action = self._queue.get(timeout=left)
                except Empty:
                    action = self._due()
            if action is not None:
                try:
                    action()
                except Exception:
                    _log.exception("a timer failed")
                del action

    def _due(self) -> Callable[[], None] | None:
        with self._lock:
            if not self._heap or self._heap[0][0] > time.monotonic():
                return None
            return heapq.heappop(self._heap)[2]
