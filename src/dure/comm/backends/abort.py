"""The abort record: why a group is broken, in a form that every rank can make its own error of.

The first rank that finds an error writes an `AbortRecord`, which names ranks of the group. The
ranks agree on one record through what they share: an object (threads), the host's segment and the
leaders' connections (hybrid), messages (mpi), the group's store (verification). Backends transfer
the record; this module defines its fields and the error that each rank makes of it.

A rank that has left does not break the operations that it had completed: other ranks may still be
completing them, and all the data that they need has been sent. So a record has the number of
collectives that stay valid (`after`). Of two records the one with the smaller number counts, and of
equal ones the first.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec

from dure.errors import (
    Aborted,
    CommError,
    CommTimeout,
    Desync,
    DureError,
    InternalError,
    PeerLost,
)

_TEXT_BYTES = 15_000
"""What fits into a shared segment, with room to spare."""


_KINDS: dict[str, type[DureError]] = {
    kind.__name__: kind
    for kind in (CommTimeout, PeerLost, Desync, Aborted, CommError, InternalError)
}
"""The errors that a record can become, the most specific first."""
_FIELDS = {
    **dict.fromkeys(_KINDS, ()),
    "CommTimeout": ("missing", "whereabouts"),
    "PeerLost": ("pid", "host", "exit"),
    "Desync": ("calls",),
}
"""The fields that an error of each kind has besides those of all errors."""


class AbortRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Why a group is broken; the fields are those of the errors it becomes.

    `after` is the number of collectives that stay valid; later ones will never run.
    `reporter` is the rank that has lost the connection to the host of `peer`, if one has.
    """

    kind: str
    what: str
    peer: int | None = None
    reporter: int | None = None
    missing: tuple[int, ...] = ()
    whereabouts: dict[int, str] = {}
    calls: dict[int, str] = {}
    seen: str = ""
    fix: str = ""
    pid: int | None = None
    host: str | None = None
    exit: str | None = None
    elapsed_s: float | None = None
    after: int = 0

    @classmethod
    def of(cls, error: DureError, after: int = 0) -> AbortRecord:
        """Return what peers need in order to make the same error."""
        kind = next((kind for kind in _FIELDS if isinstance(error, _KINDS[kind])), "InternalError")
        own = {name: getattr(error, name) for name in _FIELDS[kind]}
        texts: dict[str, Any] = {"what": error.what, "seen": error.seen, "fix": error.fix}
        return cls(kind=kind, peer=error.peer, after=after, **texts, **own)

    @classmethod
    def desync(cls, problem: str, calls: dict[int, str]) -> AbortRecord:
        """Return the record of ranks whose `calls` differ."""
        texts = "; ".join(f"rank {r}: {text}" for r, text in calls.items())
        return cls(
            kind="Desync",
            what="the ranks did not call the same thing",
            calls=calls,
            seen=f"{problem}: {texts}",
            fix="No data were changed. Make all ranks call the same operations in the same order.",
        )

    @classmethod
    def gone(cls, rank: int, after: int = 0) -> AbortRecord:
        """Return the record of a rank that left."""
        return cls(kind="PeerLost", what=f"rank {rank} left the group", peer=rank, after=after)

    def text(self) -> str:
        """Encode it, without the longest parts if it is too long."""
        encoded = msgspec.json.encode(self)
        if len(encoded) > _TEXT_BYTES:
            short = msgspec.structs.replace(self, calls={}, whereabouts={}, seen="")
            encoded = msgspec.json.encode(short)
        return encoded.decode()

    @classmethod
    def read(cls, text: str | bytes) -> AbortRecord:
        """Decode what `text` has made."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return cls(kind="CommError", what="the group is broken")

    def error(self, **where: Any) -> DureError:
        """Make the exception for one call (`group`, `op`, `seq`, `rank`, ...).

        The rank that the record is about sees `Aborted`: it has left, and nothing was lost to it.
        """
        fields: dict[str, Any] = {"peer": self.peer, "seen": self.seen, "fix": self.fix} | where
        if self.elapsed_s is not None:
            fields["elapsed_s"] = self.elapsed_s
        if self.kind == "PeerLost" and self.peer is not None and self.peer == where.get("rank"):
            return Aborted("the group was left while the operation was pending", **where)
        kind = self.kind if self.kind in _KINDS else "CommError"
        own = {name: getattr(self, name) for name in _FIELDS[kind]}
        return _KINDS[kind](self.what, **own, **fields)


class GroupState:
    """Whether a group is broken, and by what, as one rank knows it. Threads: any.

    Args:
        name: The group's name.
        rank: This rank.
        size: Ranks of the group.

    Attributes:
        left: Set once this rank has left the group.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.left = threading.Event()
        self._lock = threading.Lock()
        self._record: AbortRecord | None = None

    @property
    def record(self) -> AbortRecord | None:
        """What the group is broken by."""
        return self._record

    def look(self) -> AbortRecord | None:
        """Return `record`; a backend whose ranks share a record reads that one first."""
        return self._record

    def adopt(self, record: AbortRecord) -> bool:
        """Break the group by `record`; return False if an earlier record counts instead."""
        with self._lock:
            if self._record is not None and self._record.after <= record.after:
                return False
            self._record = record
        return True

    def ends(self, number: int) -> bool:
        """Return whether the collective after `number` others will never run."""
        return self._record is not None and number >= self._record.after

    def where(self, op: str, seq: int | None = None, began: float | None = None) -> dict[str, Any]:
        """Return the fields that say where an error happened."""
        fields: dict[str, Any] = {"group": self.name, "op": op, "seq": seq}
        fields |= {"rank": self.rank, "world_size": self.size}
        if began is not None:
            fields["elapsed_s"] = time.monotonic() - began
        return fields

    def error(self, op: str, seq: int | None = None, began: float | None = None) -> DureError:
        """Make the error of a call in a group that is broken, or left."""
        where = self.where(op, seq, began)
        if self._record is None:
            return Aborted("the group was left while the operation was pending", **where)
        return self._record.error(**where)

    def check(self, op: str, seq: int | None = None) -> None:
        """Raise the error that the group is broken by, if it is."""
        if self.look() is not None:
            raise self.error(op, seq)
