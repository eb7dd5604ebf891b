"""Spans: what a step is made of, for a timeline, told only when somebody listens.

Operations of groups are recorded always (`flight`). What lies around them is not: the phases of a
training step, and which gradients travel in which bucket. Whoever knows emits it as a `Span`
through this seam, and knows nothing of who listens:

    if spans.listeners:                              # the one branch paid when nobody does
        spans.emit(Span(name="forward", track="step", ...))

The listener is a `Keeper`, which `dure.trace.record_steps` starts and stops; `dump` writes what it
kept beside the operations. `dure trace merge -o` puts both on one timeline. Remote calls that a
rank has run are spans, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["BUCKETS", "CALLS", "MODULES", "STEP", "WAITS", "Keeper", "Span", "emit", "listeners"]

STEP, BUCKETS, MODULES, WAITS = "step", "buckets", "modules", "waits"
"""Tracks: phases, one at a time on each rank; buckets of gradients, gathers and reductions of
modules, which overlap them and each other; what a rank did nothing but wait for."""

CALLS = "calls"
"""The track of remote calls that a rank has run, each from when it came."""

_CAPACITY = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time on one rank.

    Attributes:
        name: What it was, such as "forward".
        track: The row of the timeline that it belongs to, such as `STEP`.
        global_rank: Whose it was.
        start_ns: When it began, on `time.monotonic_ns`.
        end_ns: When it ended on the same clock; of a bucket, when its end was noticed.
        started_ns: Of a bucket, a gather or a reduction: when its operations had been started, so
            that they can be found among those of `group`; 0 otherwise.
        group: Name of the process group that the operation is of; empty where there is none.
        details: What a reader may want to know, by name.
    """

    name: str
    track: str = STEP
    global_rank: int = 0
    start_ns: int = 0
    end_ns: int = 0
    started_ns: int = 0
    group: str = ""
    details: dict[str, str | int | float] = field(default_factory=dict[str, str | int | float])


listeners: list[Callable[[Span], object]] = []
"""Who listens; changed in place, so that the test whether anybody does is a look at its length."""


def emit(span: Span) -> None:
    """Show `span` to whoever listens."""
    for listener in tuple(listeners):
        listener(span)


class Keeper:
    """The last spans of each rank of the process; listens while anybody wants it to.

    Threads: every method may be called from any thread; ranks may be threads.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._kept: dict[int, deque[Span]] = {}
        self._num_users = 0
        self._lock = threading.RLock()  # a signal handler may dump while its thread is in here

    def start(self) -> None:
        """Listen; who starts first begins with nothing kept."""
        with self._lock:
            if self._num_users == 0:
                self._kept.clear()
                listeners.append(self.keep)
            self._num_users += 1

    def stop(self) -> None:
        """Stop listening, where nobody else goes on; what was kept stays."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                listeners.remove(self.keep)

    def keep(self, span: Span) -> None:
        """Keep `span`; the oldest one of its rank goes where there are too many."""
        with self._lock:
            ring = self._kept.setdefault(span.global_rank, deque(maxlen=self._capacity))
            ring.append(span)

    def of(self, rank: int, last: int | None = None) -> list[Span]:
        """Return the kept spans of a global rank, or the `last` ones told, the earliest first."""
        with self._lock:
            kept = list(self._kept.get(rank, ()))
        return sorted(kept[-last if last else 0 :], key=lambda span: span.start_ns)
