"""What one rank communicated: the list that a test of a strategy states and compares.

Right numbers do not show that nothing was sent twice. A recorder collects the operations that a
rank calls while it is open, in the order of the calls, whatever thread makes them:

    with CommRecorder() as seen:
        model(batch).sum().backward()
    assert seen.ops == ["all_reduce", "all_reduce"]
"""

from __future__ import annotations

import threading
from collections import Counter
from types import TracebackType

from dure import trace
from dure.comm.queries import get_rank, is_initialized

__all__ = ["CommRecorder"]


class CommRecorder:
    """Collects the operations that this rank starts between entering and leaving.

    Args:
        rank: Global rank to listen to; None stands for the rank that enters, or, where there is no
            default group yet, for every rank of the process.
        group: Name of the only group to listen to; None stands for all.

    Threads: operations are collected from every thread. Recorders may be nested.
    """

    def __init__(self, *, rank: int | None = None, group: str | None = None) -> None:
        self._rank, self._group = rank, group
        self._events: list[trace.Event] = []
        self._lock = threading.Lock()
        self._hook: trace.Hook | None = None

    def __enter__(self) -> CommRecorder:
        if self._rank is None and is_initialized():
            self._rank = get_rank()
        self._hook = trace.add_hook(before=self._record)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._hook is not None:
            trace.remove_hook(self._hook)

    def _record(self, event: trace.Event) -> None:
        if self._rank is not None and event.global_rank != self._rank:
            return
        if self._group is not None and event.group != self._group:
            return
        with self._lock:
            self._events.append(event)

    @property
    def events(self) -> list[trace.Event]:
        """The operations, in the order in which they were called."""
        with self._lock:
            return list(self._events)

    @property
    def ops(self) -> list[str]:
        """Their names, such as "all_reduce"."""
        return [event.op for event in self.events]

    @property
    def counts(self) -> Counter[str]:
        """How often each was called."""
        return Counter(self.ops)

    def nbytes(self, op: str | None = None) -> int:
        """Add up the bytes of this rank's inputs, of all operations or of those called `op`."""
        return sum(event.nbytes for event in self.events if op is None or event.op == op)
