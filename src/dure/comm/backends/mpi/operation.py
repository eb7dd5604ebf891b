"""One operation over MPI: a generator that yields stages, and the ticket of whoever waits for it.

A *stage* is a list of MPI requests that run together. When all of them have ended the generator
goes on: it works on what has arrived, and begins the next stage. It never waits itself; the lane
(`mpi.lane`) tests the requests and says how the operation ends.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from dure.comm.backends.mpi.frames import Stage
from dure.errors import DureError
from dure.native import call_site

if TYPE_CHECKING:
    from dure.comm.backends.mpi.lane import Lane

__all__ = ["Operation", "Steps"]

Steps = Generator[Stage, None, None]
"""The stages of an operation; what runs between two of them works on what has arrived."""


class Operation:
    """A collective or a message on its way; also its ticket (see `base.Ticket`).

    Args:
        lane: Where it runs.
        name: As users call it.
        steps: Its stages; None where they are yet to be set.
        peer: The rank at the other end of a message; None for a collective, or for anyone.
    """

    __slots__ = (
        "began",
        "ended",
        "error",
        "lane",
        "name",
        "peer",
        "seq",
        "site",
        "source",
        "stage",
        "steps",
    )

    def __init__(self, lane: Lane, name: str, steps: Steps | None, peer: int | None = None) -> None:
        self.lane, self.name, self.peer = lane, name, peer
        self.steps = steps
        self.stage = Stage([], [])
        self.began = time.monotonic()
        self.seq: int | None = None
        self.site = call_site() if peer is None else ""
        self.source = -1
        self.ended = False
        self.error: DureError | None = None

    def done(self) -> bool:
        """See `Ticket.done`."""
        if not self.ended:
            self.lane.poll()
        return self.ended

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Ticket.wait`."""
        if not self.ended and not self.lane.wait(self, timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True

    def end(self, error: DureError | None) -> None:
        """End, well or badly, and let the tensors go."""
        if not self.ended:
            self.steps, self.error = None, error
            self.ended = True
