"""Calls in `dure trace`: the last calls of each worker, their callees, and how long they took.

The flight recorder records a call as a message of a group "rpc" whose ranks are the workers' ids.
"""

from __future__ import annotations

from dataclasses import replace

from dure.rpc.message import MessageType
from dure.rpc.names import WorkerInfo
from dure.trace.flight import FlightRing, Origin, add_source, retire

__all__ = ["OPS", "Recorder"]

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
