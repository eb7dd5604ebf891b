"""A recorder of the operations that a rank calls.

Correct results do not show that nothing was sent twice; a test can compare the list of operations.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import TracebackType

from dure import trace
from dure.comm.queries import get_rank, is_initialized

__all__ = ["CommRecorder"]


class CommRecorder:
    """Records the operations that a rank starts inside a `with` block, in the order of the calls.

    Args:
        rank: Global rank to record; None for the rank that enters the block, or for every rank of
            the process if there is no default group.
        group: Name of the group to record; None for all groups.

    Threads:
        Operations of every thread are recorded. Recorders may be nested.

    Example:
        ```python
        from dure.testing import CommRecorder

        with CommRecorder() as recorder:
            dist.all_reduce(torch.ones(4))
        assert recorder.ops == ["all_reduce"]
        assert recorder.nbytes() == 16
        ```
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
        """The operations in the order of the calls."""
        with self._lock:
            return list(self._events)

    @property
    def ops(self) -> list[str]:
        """The names of the operations, such as "all_reduce"."""
        return [event.op for event in self.events]

    @property
    def counts(self) -> Counter[str]:
        """The number of calls of each operation."""
        return Counter(self.ops)

    def nbytes(self, op: str | None = None) -> int:
        """Return the sum of the bytes of this rank's inputs.

        Args:
            op: Only operations of this name; None for all.

        Returns:
            The number of bytes.
        """
        return sum(event.nbytes for event in self.events if op is None or event.op == op)
