"""Calls in `dure trace`: what each worker called last, for whom it waits, how long calls wait.

A call is kept by the flight recorder, as a message of a group "rpc" whose ranks are the workers'
ids. Calls that come are told of as spans, where steps are recorded (`dure.trace.record_steps`):
from when a call came to its end, with how long it waited for a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic_ns

from dure.errors import RpcError
from dure.rpc.envelope import Envelope, Kind
from dure.rpc.names import WorkerInfo
from dure.trace import spans
from dure.trace.flight import FlightRing, Origin, add_source, retire

__all__ = ["OPS", "Recorder", "served"]

OPS = {Kind.CALL: "rpc", Kind.MAKE: "remote", Kind.FETCH: "to_here"}


class Recorder:
    """The calls of one worker.

    Args:
        me: The worker.

    Attributes:
        begin: Notes a call (`FlightRing.begin`).
        end: Notes that a call has ended.
    """

    def __init__(self, me: WorkerInfo) -> None:
        self._ring = FlightRing(Origin(group="rpc", rank=me.id, global_ranks=_ranks(me.id)))
        self.begin, self.end = self._ring.begin, self._ring.end

    def start(self) -> None:
        """Have dumps show the calls."""
        add_source(self._ring)

    def joined(self, id: int) -> None:
        """Take note of a worker."""
        if id >= len(self._ring.origin.global_ranks):
            self._ring.origin = replace(self._ring.origin, global_ranks=_ranks(id))

    def close(self) -> None:
        """Keep what was called for later dumps."""
        retire(self._ring)


def _ranks(last: int) -> tuple[int, ...]:
    return tuple(range(last + 1))


def served(
    me: int,
    envelope: Envelope,
    came_ns: int,
    run: Callable[[RpcError | None], None],
    refusal: RpcError | None,
) -> None:
    """Run a call that came, or refuse it, and tell of it."""
    began_ns = monotonic_ns()
    run(refusal)
    ended_ns = monotonic_ns()
    function = envelope.body.function.rpartition(":")[2] or OPS[Kind(envelope.kind)]
    details: dict[str, str | int | float] = {
        "caller": envelope.sender,
        "queued_ms": (began_ns - came_ns) / 1e6,
        "ran_ms": (ended_ns - began_ns) / 1e6,
    }
    span = spans.Span(
        name=function,
        track=spans.CALLS,
        global_rank=me,
        start_ns=came_ns,
        end_ns=ended_ns,
        details=details,
    )
    spans.emit(span)
