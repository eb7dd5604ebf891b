"""What broke a hybrid group: one abort record, the same on all ranks that can still be told.

Whoever meets an error first turns it into an `AbortRecord`, in ranks of the whole group, and writes
it into its host's shared segment, where it ends whatever the ranks of that host are waiting for.
The host's leader tells the other leaders (control.py), which do the same. A segment that broke by
itself, because a rank of the host died, holds the engine's own record, in the host's numbers: it
is translated.

**Completed counts.** A rank that goes away, in order or not, must not break what it has been
through: others may still be on their way out of it, and all that they need has been sent. So every
rank notes each end in memory that the ranks of its host share, where it can still be read when the
rank itself cannot be asked any more. A record says how many collectives it leaves whole (`after`),
and each rank minds it when it has ended as many. A leader that hears of it earlier keeps it back,
because in its host's segment a record ends whatever the leader itself waits for. The other ranks
lose nothing by it there: once their leader has ended an operation, all have come to the last
barrier of it.

**Two deaths.** A host's ranks agree on what its segment holds: whoever adopts a record has first
offered it to the segment and then adopts what is there, its own or another's.

Cost: one store into memory for each collective.
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
"""How long an engine's error waits for a record that knows more than it does."""
_LOOK_S = 0.002
_FIX = "See that rank's own output; then make a new group of the ranks that are left."


class HybridState(GroupState):
    """Whether a group is broken, and by what. Threads: every method, from any thread.

    Args:
        local: The ranks of this host.
        hosts: Who is where.
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
        """How many collectives each rank of this host has ended, by local number."""
        self.timeout_s = timeout_s
        self._kept: tuple[AbortRecord, float] | None = None  # and until when, at most
        self.engines: list[Backend] = []
        self.listeners: list[Callable[[], object]] = []

    @property
    def num_completed(self) -> int:
        """How many collectives this rank has ended."""
        return self.completed[self._hosts.local]

    def complete(self) -> None:
        """Note that this rank has ended one more. Threads: one at a time."""
        self.completed[self._hosts.local] += 1

    def look(self) -> AbortRecord | None:
        """Return `record`, after a look at whether there is one that this rank must mind by now."""
        if self._record is None and not self.left.is_set():
            found = self._find()
            if found is not None and found.after <= self.num_completed:
                self._break(found)
        return self._record

    def _find(self) -> AbortRecord | None:
        """Return the record that another rank of this host wrote, or that is kept back here."""
        found = self._in_segment()
        if found is None and self._kept is not None:
            found, until = self._kept
            if time.monotonic() > until:
                found = self._cut(found)
        return found

    def _cut(self, record: AbortRecord) -> AbortRecord:
        """Return a record that leaves nothing whole but what this rank has ended."""
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
            patience_s: How long what the record leaves whole may take to end.
        """
        if self._record is not None:
            return
        if record.after <= self.num_completed:
            self._break(record)
        elif self._kept is None:
            self._kept = record, time.monotonic() + patience_s

    def _break(self, record: AbortRecord) -> None:
        """Offer `record` to the host's segment, and adopt what that holds then."""
        self._local.group.abort(record.text())
        found = self._in_segment()
        if found is None or found == AbortRecord.read(record.text()):
            found = record  # which may say more than there is room for
        self.adopt(found)

    def adopt(self, record: AbortRecord) -> bool:
        """Break the group by `record`, the first; end what is waited for."""
        with self._lock:
            if self._record is not None:
                return False
            self._record = record
        for listener in self.listeners:
            listener()
        for engine in self.engines:  # ends what is waited for there
            engine.close(True)
        return True

    def lose(
        self, peer: int, what: str, after: int, patience_s: float = math.inf, **said: Any
    ) -> None:
        """Break the group because rank `peer` is lost, as `settle` does; `said` are more fields."""
        host = self._hosts.names[self._hosts.places[peer][0]]
        fields: dict[str, Any] = {"peer": peer, "host": host, "fix": _FIX, "after": after} | said
        self.settle(AbortRecord(kind="PeerLost", what=what, **fields), patience_s)

    def interrupt(self) -> None:
        """Break the group because this rank leaves an operation half-way, by a signal."""
        rank, after = self.rank, self.num_completed
        what = f"rank {rank} was interrupted"
        self.settle(AbortRecord(kind="PeerLost", what=what, peer=rank, fix=_FIX, after=after))

    def fail(self, seen: str) -> None:
        """Break the group because a step of an operation has failed on this rank."""
        what, after = f"rank {self.rank} could not go on", self.num_completed
        self.settle(AbortRecord(kind="CommError", what=what, seen=seen, fix=_FIX, after=after))

    def blame(self, error: DureError, op: str, seq: int | None = None) -> DureError:
        """Return the error to raise for one that a part of the backend raised.

        An engine knows that a connection broke and not why; whoever knows has a moment to say it.
        """
        until = time.monotonic() + _GRACE_S
        while self.look() is None and not self.left.is_set():
            found = self._find()  # it need not be kept back for an operation that failed
            if found is not None:
                self._break(self._cut(found))
            elif isinstance(error, (CommTimeout, Desync)) or time.monotonic() > until:
                self._break(self._translate(error, engine=True))
            else:
                time.sleep(_LOOK_S)
        return self.error(op, seq)

    @staticmethod
    def cause(error: DureError) -> DureError | None:
        """Return `error` as the cause of the group's error, or None if it only has its record."""
        return None if AbortRecord.is_in(error.seen) else error

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
