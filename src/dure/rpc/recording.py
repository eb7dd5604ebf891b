"""Calls in `dure trace`: the last calls of each worker, their callees, and how long they waited.

The flight recorder records a call as a message of a group "rpc" whose ranks are the workers' ids.
While steps are recorded (`dure.trace.record_steps`), each call that runs here is a span: from its
arrival to its end, with the time that it waited for a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic_ns

from dure.errors import RpcError
from dure.rpc.message import MessageType, RpcMessage
from dure.rpc.names import WorkerInfo
from dure.trace import spans
from dure.trace.flight import FlightRing, Origin, add_source, retire

__all__ = ["OPS", "Recorder", "served"]

OPS = {MessageType.CALL: "rpc", MessageType.MAKE: "remote", MessageType.FETCH: "to_here"}


class Recorder:
    """The calls of one worker.

    Args:
        me: The worker.

    Attributes:
        begin: Records the start of a call (`FlightRing.begin`).
        end: Records its end.
    """

    def __init__(self, me: WorkerInfo) -> None:
        self._ring = FlightRing(Origin(group="rpc", rank=me.id, global_ranks=_ranks(me.id)))
        self.begin, self.end = self._ring.begin, self._ring.end

    def start(self) -> None:
        """Add the calls to dumps."""
        add_source(self._ring)

    def joined(self, id: int) -> None:
        """Add a worker."""
        if id >= len(self._ring.origin.global_ranks):
            self._ring.origin = replace(self._ring.origin, global_ranks=_ranks(id))

    def close(self) -> None:
        """Keep the calls for later dumps."""
        retire(self._ring)


def _ranks(last: int) -> tuple[int, ...]:
    return tuple(range(last + 1))


def served(
    me: int,
    message: RpcMessage,
    came_ns: int,
    run: Callable[[RpcError | None], None],
    refusal: RpcError | None,
) -> None:
    """Run a call of another worker, or refuse it, and emit a span."""
    began_ns = monotonic_ns()
    run(refusal)
    ended_ns = monotonic_ns()
    function = message.body.function.rpartition(":")[2] or OPS[MessageType(message.kind)]
    details: dict[str, str | int | float] = {
        "caller": message.sender,
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
