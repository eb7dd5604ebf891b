"""Spans: the phases of a training step, for a timeline; emitted only if there is a listener.

Operations of groups are always recorded (`flight`). Phases of a training step and gradient buckets
are emitted as spans by the modules that implement them:

    if spans.listeners:                              # the only cost without listeners
        spans.emit(Span(name="forward", track="step", ...))

The listener is a `SpanRecorder`, which `dure.trace.record_steps` starts and stops. `dump` writes
its spans along with the operations, and `dure trace merge -o` draws both on one timeline.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = [
    "BUCKETS",
    "MODULES",
    "STEP",
    "WAITS",
    "Span",
    "SpanRecorder",
    "emit",
    "listeners",
]

STEP, BUCKETS, MODULES, WAITS = "step", "buckets", "modules", "waits"
"""Tracks: phases, one at a time on each rank; gradient buckets; gathers and reductions of sharded
modules; times in which a rank only waited. Buckets and modules overlap phases and each other."""

_CAPACITY = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A period of time on one rank, such as a phase of a step.

    Attributes:
        name: Name of the period, such as "forward".
        track: The row of the timeline, such as "step".
        global_rank: Global rank.
        start_ns: Start, on `time.monotonic_ns`.
        end_ns: End on the same clock; for a bucket, when its end was noticed.
        started_ns: For a bucket, a gather or a reduction: when all its operations had been started,
            which identifies them among the operations of `group`; else 0.
        group: Name of the process group of the operations; empty if there is none.
        details: Other facts by name.

    Obtained from:
        `spans`.
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
"""Functions that get every span; changed in place, so that testing for one only reads its length.
"""


def emit(span: Span) -> None:
    """Pass `span` to the listeners."""
    for listener in tuple(listeners):
        listener(span)


class SpanRecorder:
    """Records the last spans of each rank of the process between `start` and `stop`.

    Threads:
        Every method may be called from any thread; ranks may be threads.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._kept: dict[int, deque[Span]] = {}
        self._lock = threading.RLock()  # a signal handler may dump while its thread is in here

    def start(self) -> None:
        """Start with no spans."""
        with self._lock:
            self._kept.clear()
            listeners.append(self.keep)

    def stop(self) -> None:
        """Stop recording; the recorded spans remain."""
        listeners.remove(self.keep)

    def keep(self, span: Span) -> None:
        """Record `span`; drops the oldest span of its rank if there are too many."""
        with self._lock:
            ring = self._kept.setdefault(span.global_rank, deque(maxlen=self._capacity))
            ring.append(span)

    def of(self, rank: int, last: int | None = None) -> list[Span]:
        """Return the spans of a global rank by start time, or only the `last` recorded ones."""
        with self._lock:
            kept = list(self._kept.get(rank, ()))
        return sorted(kept[-last if last else 0 :], key=lambda span: span.start_ns)
