"""The abort record of a hybrid group: the same on all ranks that can still be reached.

The first rank that finds an error turns it into an `AbortRecord`, with ranks of the complete group,
and writes it into its host's shared segment, where it ends the waits of that host's ranks. The
host's leader sends it to the other leaders (control.py), which do the same. If a rank of the host
died, the segment has the engine's record, with the host's rank numbers: it is translated.

**Completed counts.** A rank that leaves or dies must not break the collectives that it completed:
other ranks may still be completing them, and all the data that they need has been sent. So every
rank counts its completed collectives in memory that the ranks of its host share, where the number
can be read after the rank has died. A record has the number of collectives that stay valid
(`after`), and each rank adopts it once it has completed as many. A leader that receives it earlier
delays it, because in its host's segment a record ends the leader's own wait. The host's other ranks
lose nothing by it: once their leader has completed an operation, all have arrived at its last
barrier.

**Two deaths.** The ranks of a host agree on the record in its segment: a rank that adopts a record
first offers it to the segment, and then adopts the record there, its own or another's.

Cost:
    One store into memory for each collective.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from dure.comm.backends.abort import AbortRecord, GroupState
from dure.comm.backends.base import Backend
from dure.comm.backends.hybrid.subcomms import Hosts
from dure.comm.backends.shm.backend import ShmBackend
from dure.errors import CommTimeout, Desync, DureError, PeerLost
from dure.native.status import Status

__all__ = ["HybridState"]

_GRACE_S = 1.0
"""How long an engine's error waits for a record with more detail."""
_LOOK_S = 0.002
_FIX = "See that rank's own output; then make a new group of the ranks that are left."


class HybridState(GroupState):
    """Whether a group is broken, and by what. Threads: every method, from any thread.

    Args:
        local: The ranks of this host.
        hosts: The ranks by host.
        name: The group's name.
        timeout_s: How long an operation may wait.

    Collective:
        All ranks of the host make it.
    """

    def __init__(self, local: ShmBackend, hosts: Hosts, name: str, timeout_s: float) -> None:
        super().__init__(name, hosts.rank, hosts.size)
        self._local, self._hosts = local, hosts
        self._memory = local.allocate(8 * len(hosts.mine), True)
        words = ctypes.c_int64 * len(hosts.mine)
        self.completed = words.from_address(self._memory.data_ptr())
        """How many collectives each rank of this host has completed, by local number."""
        self.timeout_s = timeout_s
        self._delayed: tuple[AbortRecord, float] | None = None  # the record, and until when
        self.engines: list[Backend] = []
        self.listeners: list[Callable[[], object]] = []

    @property
    def num_completed(self) -> int:
        """How many collectives this rank has completed."""
        return self.completed[self._hosts.local]

    def complete(self) -> None:
        """Count one more completed collective. Threads: one at a time."""
        self.completed[self._hosts.local] += 1

    def look(self) -> AbortRecord | None:
        """Return `record`, after adopting one that now applies to this rank."""
        if self._record is None and not self.left.is_set():
            found = self._find()
            if found is not None and found.after <= self.num_completed:
                self._break(found)
        return self._record

    def _find(self) -> AbortRecord | None:
        """Return the record that another rank of this host wrote, or that is delayed here."""
        found = self._in_segment()
        if found is None and self._delayed is not None:
            found, until = self._delayed
            if time.monotonic() > until:
                found = self._effective_now(found)
        return found

    def _effective_now(self, record: AbortRecord) -> AbortRecord:
        """Return a record by which only the collectives that this rank has completed are valid."""
        return msgspec.structs.replace(record, after=min(record.after, self.num_completed))

    def _in_segment(self) -> AbortRecord | None:
        outcome = self._local.group.failure()
        if outcome is None:
            return None
        if outcome.status == Status.OUTSIDE:
            return AbortRecord.read(outcome.detail)
        return self._translate(self._local.error(outcome))

    def settle(self, record: AbortRecord, patience_s: float = math.inf) -> None:
        """Break the group by `record`, unless it is broken; the first record is what counts.

        Args:
            record: Why.
            patience_s: How long the collectives that stay valid may take to complete.
        """
        if self._record is not None:
            return
        if record.after <= self.num_completed:
            self._break(record)
        elif self._delayed is None:
            self._delayed = record, time.monotonic() + patience_s

    def _break(self, record: AbortRecord) -> None:
        """Offer `record` to the host's segment, and adopt the record there."""
        self._local.group.abort(record.text())
        found = self._in_segment()
        if found is None or found == AbortRecord.read(record.text()):
            found = record  # the segment may have a shortened text
        self.adopt(found)

    def adopt(self, record: AbortRecord) -> bool:
        """Break the group by the first `record`; end all waits."""
        with self._lock:
            if self._record is not None:
                return False
            self._record = record
        for listener in self.listeners:
            listener()
        for engine in self.engines:
            engine.close(True)  # this ends waits for the engine
        return True

    def lose(
        self, peer: int, what: str, after: int, patience_s: float = math.inf, **more: Any
    ) -> None:
        """Break the group because rank `peer` is lost, as `settle` does; `more` are fields."""
        host = self._hosts.names[self._hosts.places[peer][0]]
        fields: dict[str, Any] = {"peer": peer, "host": host, "fix": _FIX, "after": after} | more
        self.settle(AbortRecord(kind="PeerLost", what=what, **fields), patience_s)

    def interrupt(self) -> None:
        """Break the group because a signal interrupted an operation of this rank."""
        rank, after = self.rank, self.num_completed
        what = f"rank {rank} was interrupted"
        self.settle(AbortRecord(kind="PeerLost", what=what, peer=rank, fix=_FIX, after=after))

    def fail(self, seen: str) -> None:
        """Break the group because a step of an operation has failed on this rank."""
        what, after = f"an operation failed on rank {self.rank}", self.num_completed
        self.settle(AbortRecord(kind="CommError", what=what, seen=seen, fix=_FIX, after=after))

    def blame(self, error: DureError, op: str, seq: int | None = None) -> DureError:
        """Return the error to raise for one that a part of the backend raised.

        An engine does not know why a connection broke; so this waits a moment for a record of
        another rank, which may know.
        """
        until = time.monotonic() + _GRACE_S
        while self.look() is None and not self.left.is_set():
            found = self._find()  # after a failed operation a record is not delayed
            if found is not None:
                self._break(self._effective_now(found))
            elif isinstance(error, (CommTimeout, Desync)) or time.monotonic() > until:
                self._break(self._translate(error, engine=True))
            else:
                time.sleep(_LOOK_S)
        return self.error(op, seq)

    def _translate(self, error: DureError, engine: bool = False) -> AbortRecord:
        """Turn an error with numbers of this host's ranks into a record with the group's."""
        mine, here = self._hosts.mine, self._hosts.names[self._hosts.here]
        fields: dict[str, Any] = {"peer": None, "after": self.num_completed}
        if not engine:
            fields = {"peer": None if error.peer is None else mine[error.peer]}
        match error:
            case PeerLost() if not engine:
                who = f"rank {fields['peer']}"
                left = "left" in error.what
                fields["what"] = f"{who} left the group" if left else f"the process of {who} ended"
                fields |= {"host": here, "seen": f"{error.seen}, on {here}"}
                if error.peer is not None:
                    fields["after"] = self.completed[error.peer]
            case PeerLost():
                others = [r for r in range(self._hosts.size) if r not in mine]
                fields |= {"peer": others[0], "what": "the connection to another host broke"}
                fields["fix"] = _FIX
            case CommTimeout():
                missing = error.missing if engine else tuple(mine[r] for r in error.missing)
                places = {} if engine else {mine[r]: t for r, t in error.whereabouts.items()}
                ranks = ", ".join(map(str, missing)) or "any"
                fields |= {"missing": missing, "whereabouts": places, "elapsed_s": self.timeout_s}
                fields["what"] = f"rank{'s' if len(missing) > 1 else ''} {ranks} did not arrive"
            case Desync() if not engine:
                fields["calls"] = {mine[r]: c for r, c in error.calls.items()}
            case _:
                pass
        return msgspec.structs.replace(AbortRecord.of(error), **fields)
