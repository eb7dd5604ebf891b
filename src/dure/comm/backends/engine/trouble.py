"""The trouble log: how the ranks of a foreign engine learn who left and who gave up.

An engine says "connection closed" or "timed out", but not who is to blame. So a rank that leaves,
or whose time ran out, writes a line under one key of the group's store; whoever meets an error
reads the log for a moment before it makes its own error. Nobody writes or reads while all is well.

The store may have died with the rank that hosts it: questions are asked on a thread that is given
up on after `_ASK_S`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from dure.errors import DureError
from dure.store.base import Store

__all__ = ["TroubleLog"]

_ASK_S = 0.3
_POLL_S = 0.02
_KEY = "engine/trouble"


class TroubleLog:
    """The log of one group, seen from one rank. Threads: every method, from any thread.

    Args:
        store: Where the log is; None: there is none, because somebody else knows more.
        rank: This rank.
        size: Ranks of the group.
    """

    def __init__(self, store: Store | None, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._lines: list[str] = []

    def say(self, what: str) -> None:
        """Write that this rank has left, or gave up."""
        store = self._store
        if store is not None:
            _within(_ASK_S, lambda: store.append(_KEY, f"{what} {self._rank}\n"))

    def ask(self, timed_out: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return which ranks left and which gave up waiting, the first of them first.

        Args:
            timed_out: Time ran out here too: say so, and wait for all others who do.
        """
        if timed_out:
            self.say("gave-up")
        enough = self._size - 1 if timed_out else 1
        store = self._store
        if store is not None:
            _within(_ASK_S, lambda: self._read_until(store, enough))
        words = [line.split() for line in self._lines]
        others = [(what, int(rank)) for what, rank in words if int(rank) != self._rank]
        gone = tuple(rank for what, rank in others if what == "left")
        return gone, tuple(rank for what, rank in others if what == "gave-up")

    def _read_until(self, store: Store, enough: int) -> None:
        """Read the log until it tells of `enough` other ranks, or time is up."""
        until = time.monotonic() + _ASK_S
        while time.monotonic() < until:
            if store.check([_KEY]):
                self._lines = store.get(_KEY).decode().splitlines()
            told = {line.split()[1] for line in self._lines} - {str(self._rank)}
            if len(told) >= enough:
                return
            time.sleep(_POLL_S)


def _within(limit_s: float, action: Callable[[], None]) -> None:
    """Do `action`, but wait no longer than `limit_s` for it; a store that fails says nothing."""

    def attempt() -> None:
        with suppress(DureError):
            action()

    thread = threading.Thread(target=attempt, name="dure-trouble", daemon=True)
    thread.start()
    thread.join(limit_s)
