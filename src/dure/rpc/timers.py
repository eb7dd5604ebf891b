"""One thread that runs actions at given times."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from dure.trace import logs

__all__ = ["Timers"]

_LONGEST_S = 86_400.0  # for one wait: the system refuses much longer ones

_log = logs.logger("rpc")


class Timers:
    """The thread and its queue of actions."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[float, Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="dure-rpc-timers", daemon=True)
        self._thread.start()

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run an action at a time of `time.monotonic`, or at once if that is past.

        May be called from finalizers: takes no lock.
        """
        self._queue.put((when, action))

    def close(self) -> None:
        """End, after the actions that are due."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        heap: list[tuple[float, int, Callable[[], None]]] = []
        order, is_open = itertools.count(), True
        while is_open:
            left = heap[0][0] - time.monotonic() if heap else _LONGEST_S
            try:
                item = self._queue.get(timeout=min(max(0.0, left), _LONGEST_S))
                is_open = item is not None
                if item is not None:
                    heapq.heappush(heap, (item[0], next(order), item[1]))
            except Empty:
                pass
            while heap and heap[0][0] <= time.monotonic():
                _try(heapq.heappop(heap)[2])


def _try(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        _log.exception("a timer failed")
