"""Detection of deadlocks between thread-ranks, when the last of them begins to wait.

If a test makes every send wait for its receive (`BackendOptions.eager_bytes`), the thread-ranks of
a job keep one table of their waits in all groups. An operation ends only through a call of another
rank. So once every rank that has not left waits, and none of the awaited operations has ended, the
ranks are deadlocked: all of them raise `Desync`, with the operation for which each one waits.

This is certain only if each rank makes all its calls on one thread. So a job in which another
thread calls for a rank is left to its timeouts, and so is one whose ranks wait elsewhere, in the
store or for a lock. Waits with a limit do not count.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from dure.comm.backends.abort import AbortRecord
from dure.store.base import Store
from dure.store.prefix import PrefixStore

if TYPE_CHECKING:
    from dure.comm.backends.threads.rendezvous import Pending

__all__ = ["Waiting", "table_of"]


class Waiting:
    """The waits of a job by global rank. Threads: every method, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[int, threading.Thread] = {}
        self._groups: dict[int, int] = {}
        self._waits: dict[int, Pending] = {}
        self._certain = True

    def join(self, rank: int) -> None:
        """Note that the calling thread calls for `rank`, in one more group."""
        with self._lock:
            self._note(rank)
            self._groups[rank] = self._groups.get(rank, 0) + 1

    def leave(self, rank: int) -> None:
        """Note that `rank` has left one of its groups; ranks that have left all do not count."""
        with self._lock:
            self._groups[rank] -= 1

    def _note(self, rank: int) -> None:
        if self._threads.setdefault(rank, threading.current_thread()) is not (
            threading.current_thread()
        ):
            self._certain = False

    def begin(self, rank: int, wait: Pending) -> None:
        """Note that `rank` waits; if the ranks are deadlocked now, end all waits."""
        with self._lock:
            self._note(rank)
            self._waits[rank] = wait
            living = [r for r, num_groups in self._groups.items() if num_groups]
            waits = {r: self._waits[r] for r in living if r in self._waits}
            free = len(waits) < len(living) or any(w.ended for w in waits.values())
            if free or not self._certain:
                return
        texts = {r: waits[r].text() for r in sorted(waits)}
        record = AbortRecord(
            kind="Desync",
            what="all ranks wait for each other forever",
            calls=texts,
            seen="; ".join(f"rank {r} waits in {text}" for r, text in texts.items()),
            fix="A send may have to wait for its receive: let one side receive first, or use isend "
            "and irecv.",
        )
        for each in waits.values():
            each.expire(record)

    def end(self, rank: int) -> None:
        """Note that `rank` no longer waits."""
        with self._lock:
            self._waits.pop(rank, None)


_tables: WeakKeyDictionary[Store, Waiting] = WeakKeyDictionary()
_tables_lock = threading.Lock()


def table_of(store: Store) -> Waiting:
    """Return the table of the job whose ranks meet in `store`."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    with _tables_lock:
        return _tables.setdefault(store, Waiting())
