"""The in-process store: a board and a condition variable, for ranks that are threads."""

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
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._board = Board()
        self._answers: dict[bytes, Reply] = {}
        self._changed = threading.Condition()
        self._numbers = itertools.count()

    def clone(self) -> HashStore:
        return copy.copy(self)

    @property
    def _named(self) -> str:
        return "the in-process store"

    def _answered(self, request: StoreRequest, patience_s: float) -> Reply | None:
        """Each request counts as a client; waiting threads also handle the board's deadlines."""
        me = b"%d" % next(self._numbers)
        with self._changed:
            self._note(self._board.expire(time.monotonic()))
            try:
                self._note(self._board.handle(me, request, time.monotonic()))
                while me not in self._answers:
                    due = self._board.next_deadline()
                    left_s = _LONGEST_WAIT_S if due is None else due - time.monotonic()
                    self._changed.wait(max(0.0, min(left_s, _LONGEST_WAIT_S)))
                    self._note(self._board.expire(time.monotonic()))
                return self._answers.pop(me)
            finally:
                self._board.leave(me)

    def _note(self, answers: list[tuple[bytes, Reply]]) -> None:
        """Keep the answers for the threads that wait for them, and wake those."""
        if answers:
            self._answers.update(answers)
            self._changed.notify_all()
