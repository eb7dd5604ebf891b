"""Verdicts: how the ranks of an MPI group learn who left, and what failed elsewhere.

A rank that leaves, or whose collective fails, tells all peers in a message of its own, with the
number of collectives that it completed: later ones will never take place, and all who wait for one
raise. Nobody sends anything while all is well.

A communicator must not be freed while a message may be on its way to it. Each rank's last message
in a group is the verdict that it left; so a communicator is *retired* when its group is closed,
and freed when all peers have said that they left, which is looked for whenever a group comes or
goes. That of a group that failed is kept to the end, because MPI cannot call off a send.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from dure.comm.backends.mpi.library import Library
from dure.errors import Aborted, CommError, CommTimeout, Desync, DureError, InternalError, PeerLost

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Retired", "Verdicts", "free_retired"]

_KINDS: dict[str, type[CommError]] = {
    kind.__name__: kind for kind in (PeerLost, CommTimeout, Desync, Aborted)
}


class Verdicts:
    """The verdicts on one group, seen from one rank.

    Args:
        library: MPI; its lock is held during every call.
        comm: The group's communicator.
        tag: Which messages are verdicts.
    """

    def __init__(self, library: Library, comm: MPI.Intracomm, tag: int) -> None:
        self._library, self._comm, self._tag = library, comm, tag
        self._any = library.MPI.ANY_SOURCE
        self._end_at: int | None = None
        self._why: dict[str, Any] = {}
        self.left: dict[int, float] = {}
        """Which ranks left, and when we heard of it."""

    def ends(self, seq: int | None) -> bool:
        """Tell whether collective `seq` will never take place; a message (None) always can."""
        return self._end_at is not None and seq is not None and seq >= self._end_at

    def error(self, where: dict[str, Any]) -> DureError:
        """Make this rank's error of what ended the group."""
        fields = dict(self._why)
        kind = _KINDS.get(fields.pop("kind"), InternalError)
        if "missing" in fields:
            fields["missing"] = tuple(fields["missing"])
        if "calls" in fields:
            fields["calls"] = {int(rank): text for rank, text in fields["calls"].items()}
        return kind(fields.pop("what"), **where, **fields)

    def fail(self, error: DureError, num_completed: int) -> None:
        """A collective failed here, so there will be no more; tell all who do not know."""
        if self._end_at is None:
            self._note(num_completed, _as_verdict(error))
            self._tell({"end_at": num_completed, **self._why})

    def leave(self, rank: int, num_completed: int) -> None:
        """Tell all that this rank, `rank`, has left."""
        verdict = {"kind": "PeerLost", "what": f"rank {rank} left the group", "peer": rank}
        self._tell({"end_at": num_completed, "left": True, **verdict})

    def hear(self) -> None:
        """Take what verdicts have come; most often there are none."""
        if not self._comm.Iprobe(self._any, self._tag):
            return
        for peer, verdict in _heard(self._library, self._comm, self._tag):
            end_at = verdict.pop("end_at")
            if verdict.pop("left", False):
                self.left[peer] = time.monotonic()
            self._note(end_at, verdict)

    def _note(self, end_at: int, why: dict[str, Any]) -> None:
        if self._end_at is None or end_at < self._end_at:
            self._end_at, self._why = end_at, why

    def _tell(self, verdict: dict[str, Any]) -> None:
        text = json.dumps(verdict).encode()
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        sent = [self._comm.Isend(text, r, self._tag) for r in range(size) if r != rank]
        if sent and not self._library.MPI.Request.Testall(sent):
            self._library.kept.append((sent, text))


class Retired:
    """The communicator of a group that this rank left in good order.

    Args:
        comm: It.
        tag: Which messages are verdicts.
        still_there: The peers that have not said that they left.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int, still_there: set[int]) -> None:
        self.comm, self.tag, self.still_there = comm, tag, still_there


def free_retired(library: Library) -> None:
    """Free the communicators that nobody can write to any more; the lock is held."""
    for old in list(library.retired):
        for peer, verdict in _heard(library, old.comm, old.tag):
            if verdict.get("left"):
                old.still_there.discard(peer)
        if not old.still_there:
            library.retired.remove(old)
            old.comm.Free()


def _heard(
    library: Library, comm: MPI.Intracomm, tag: int
) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Yield the verdicts that have come on `comm`, and who sent them."""
    mpi = library.MPI
    status = mpi.Status()
    while comm.Iprobe(mpi.ANY_SOURCE, tag, status):
        peer = status.Get_source()
        text = bytearray(status.Get_count(mpi.BYTE))
        comm.Recv(text, peer, tag)
        yield peer, json.loads(text)


def _as_verdict(error: DureError) -> dict[str, Any]:
    """Return what peers need in order to make the same error."""
    verdict: dict[str, Any] = {"kind": type(error).__name__, "what": error.what}
    verdict |= {"peer": error.peer, "seen": error.seen, "fix": error.fix}
    if isinstance(error, CommTimeout):
        verdict["missing"] = error.missing
    if isinstance(error, Desync):
        verdict["calls"] = error.calls
    return verdict
