"""The in-process store: a board and a lock, for ranks that are threads."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from datetime import timedelta

from dure.store.asking import AskingStore
from dure.store.base import DEFAULT_TIMEOUT
from dure.store.board import Board
from dure.store.wire import Reply, StoreRequest

__all__ = ["HashStore"]

_LONGEST_WAIT_S = 3600.0


class HashStore(AskingStore):
    """A store for the threads of one process.

    Args:
        timeout: How long `get` and `wait` wait.

    Example:
        ```python
        store = dist.HashStore()
        store.set("step", "1")
        assert store.add("step", 2) == 3
        ```
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._board = Board()
        self._answers: dict[bytes, Reply] = {}
        self._lock = threading.Lock()
        self._parked: dict[bytes, threading.Event] = {}
        self._numbers = itertools.count()

    def clone(self) -> HashStore:
        return copy.copy(self)

    @property
    def _named(self) -> str:
        return "the in-process store"

    def _answered(self, request: StoreRequest, patience_s: float) -> Reply | None:
        """Each request counts as a client; a thread that waits wakes for its own answer only."""
        me, now = b"%d" % next(self._numbers), time.monotonic()
        answered = threading.Event()
        with self._lock:
            self._parked[me] = answered
            try:
                self._note(self._board.handle(me, request, now))
            except BaseException:
                self._forget(me)
                raise
            if me in self._answers:
                self._forget(me)
                return self._answers.pop(me)
        due = now + request.timeout_s
        try:
            while True:
                answered.wait(max(0.0, min(due - time.monotonic(), _LONGEST_WAIT_S)))
                with self._lock:
                    self._note(self._board.expire(time.monotonic()))
                    if me in self._answers:
                        return self._answers[me]
        finally:
            with self._lock:
                self._forget(me)
                self._answers.pop(me, None)

    def _note(self, answers: list[tuple[bytes, Reply]]) -> None:
        """Keep the answers for the threads that wait for them, and wake those."""
        for client, reply in answers:
            if client in self._parked:
                self._answers[client] = reply
                self._parked[client].set()

    def _forget(self, client: bytes) -> None:
        self._board.leave(client)
        del self._parked[client]
