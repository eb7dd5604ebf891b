"""What broke a hybrid group: one verdict, the same on all ranks that can still be told.

Whoever meets an error first turns it into a `Verdict`, in ranks of the whole group, and writes it
into its host's shared segment, where it ends whatever the ranks of that host are waiting for. The
host's leader tells the other leaders (watch.py), which do the same. A segment that broke by
itself, because a rank of the host died, holds the engine's own verdict, in the host's numbers: it
is translated.

A rank that has gone breaks no operation that it had ended: others may still be on their way out of
it, and all that they need has been sent. So a verdict says how many collectives it leaves whole
(`after`), and each rank minds it when it has ended as many. A leader that hears of it earlier keeps
it back, because in its host's segment a verdict ends whatever the leader itself waits for. The
other ranks lose nothing by it there: once their leader has ended an operation, all have come to the
last meeting of it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from dure.comm.backends.base import Backend
from dure.comm.backends.hybrid.hosts import Hosts
from dure.comm.backends.hybrid.tally import Tally
from dure.comm.backends.shm.backend import ShmBackend
from dure.errors import (
    Aborted,
    CommError,
    CommTimeout,
    Desync,
    DureError,
    InternalError,
    PeerLost,
)
from dure.native.status import Status

__all__ = ["Fate", "Verdict"]

_TEXT_BYTES = 15_000
"""What fits into the shared segment, with room to spare."""
_GRACE_S = 1.0
"""How long an engine's error waits for a verdict that knows more than it does."""
_LOOK_S = 0.002
_FIX = "See that rank's own output; then make a new group of the ranks that are left."


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why a group is broken; the fields are those of the errors it becomes.

    `after` is how many collectives it leaves whole; those after them will never take place.
    """

    kind: str
    what: str
    peer: int | None = None
    missing: tuple[int, ...] = ()
    calls: dict[int, str] = {}
    seen: str = ""
    fix: str = ""
    pid: int | None = None
    host: str | None = None
    exit: str | None = None
    elapsed_s: float | None = None
    after: int = 0

    def text(self) -> str:
        """Encode it, without the longest parts if it is too long."""
        whole = msgspec.json.encode(self)
        if len(whole) > _TEXT_BYTES:
            whole = msgspec.json.encode(msgspec.structs.replace(self, calls={}, seen=""))
        return whole.decode()

    def error(self, **where: Any) -> DureError:
        """Make the exception for one call (`op`, `seq`, `rank`, ...)."""
        fields: dict[str, Any] = {"peer": self.peer, "seen": self.seen, "fix": self.fix} | where
        if self.elapsed_s is not None:
            fields["elapsed_s"] = self.elapsed_s
        match self.kind:
            case "CommTimeout":
                return CommTimeout(self.what, missing=self.missing, **fields)
            case "PeerLost":
                return PeerLost(self.what, pid=self.pid, host=self.host, exit=self.exit, **fields)
            case "Desync":
                return Desync(self.what, calls=self.calls, **fields)
            case "Aborted":
                return Aborted(self.what, **fields)
            case "InternalError":
                return InternalError(self.what, **fields)
            case _:
                return CommError(self.what, **fields)


class Fate:
    """Whether a group is broken, and by what. Threads: every method, from any thread.

    Args:
        local: The ranks of this host.
        hosts: Who is where.
        tally: How many collectives the ranks of this host have ended.
        name: The group's name.
        timeout_s: How long an operation may wait.
    """

    def __init__(
        self, local: ShmBackend, hosts: Hosts, tally: Tally, name: str, timeout_s: float
    ) -> None:
        self._local, self._hosts, self.tally, self.name = local, hosts, tally, name
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._verdict: Verdict | None = None
        self._kept: tuple[Verdict, float] | None = None  # and until when, at most
        self.engines: list[Backend] = []
        self.listeners: list[Callable[[], object]] = []
        self.left = threading.Event()

    @property
    def verdict(self) -> Verdict | None:
        """What the group is broken by."""
        return self._verdict

    def look(self) -> Verdict | None:
        """As `verdict`, after a look at whether there is one that this rank must mind by now."""
        if self._verdict is None and not self.left.is_set():
            found = self._find()
            if found is not None and found.after <= self.tally.mine:
                self._break(found)
        return self._verdict

    def _find(self) -> Verdict | None:
        """Return the verdict that another rank of this host wrote, or that is kept back here."""
        found = self._in_segment()
        if found is None and self._kept is not None:
            found, until = self._kept
            if time.monotonic() > until:
                found = self._cut(found)
        return found

    def _cut(self, verdict: Verdict) -> Verdict:
        """Return a verdict that leaves nothing whole but what this rank has ended."""
        return msgspec.structs.replace(verdict, after=min(verdict.after, self.tally.mine))

    def _in_segment(self) -> Verdict | None:
        outcome = self._local.failure()
        if outcome is None:
            return None
        if outcome.status == Status.OUTSIDE:
            try:
                return msgspec.json.decode(outcome.detail, type=Verdict)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return Verdict(kind="CommError", what="the group is broken")
        return self._translate(self._local.error(outcome))

    def settle(self, verdict: Verdict, patience_s: float = math.inf) -> None:
        """Break the group by `verdict`, unless it is broken; the first verdict is what counts.

        Args:
            verdict: Why.
            patience_s: How long what the verdict leaves whole may take to end.
        """
        if self._verdict is not None:
            return
        if verdict.after <= self.tally.mine:
            self._break(verdict)
        elif self._kept is None:
            self._kept = verdict, time.monotonic() + patience_s

    def _break(self, verdict: Verdict) -> None:
        self._local.condemn(verdict.text())
        found = self._in_segment()
        same_kind = found is not None and found.kind == verdict.kind
        self._adopt(verdict if found is None or (same_kind and not found.calls) else found)

    def _adopt(self, verdict: Verdict) -> None:
        with self._lock:
            if self._verdict is not None:
                return
            self._verdict = verdict
        for listener in self.listeners:
            listener()
        for engine in self.engines:  # ends what is waited for there
            engine.close(True)

    def interrupt(self) -> None:
        """Break the group because this rank leaves an operation half-way, by a signal."""
        rank = self._hosts.rank
        self.settle(
            Verdict(
                kind="PeerLost",
                what=f"rank {rank} was interrupted",
                peer=rank,
                fix=_FIX,
                after=self.tally.mine,
            )
        )

    def check(self, op: str, seq: int | None = None) -> None:
        """Raise the error that the group is broken by, if it is."""
        if self.look() is not None:
            raise self.error(op, seq)

    def error(self, op: str, seq: int | None = None) -> DureError:
        """Make the error of a call in a group that is broken, or left."""
        where: dict[str, Any] = {
            "group": self.name,
            "op": op,
            "seq": seq,
            "rank": self._hosts.rank,
            "world_size": self._hosts.size,
        }
        if self._verdict is None:
            return Aborted("the group was left while the operation was pending", **where)
        return self._verdict.error(**where)

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

    def _translate(self, error: DureError, engine: bool = False) -> Verdict:
        """Turn an error with numbers of this host's ranks into a verdict with the group's."""
        fields: dict[str, Any] = {"what": error.what, "seen": error.seen, "fix": error.fix}
        mine = self._hosts.mine
        if engine:
            fields["after"] = self.tally.mine
        elif error.peer is not None:
            fields["peer"] = mine[error.peer]
        match error:
            case PeerLost() if not engine:
                who = f"rank {fields.get('peer')}"
                left = "left" in error.what
                fields["what"] = f"{who} left the group" if left else f"the process of {who} ended"
                fields |= {"pid": error.pid, "host": self._hosts.names[self._hosts.here]}
                fields |= {"exit": error.exit, "seen": f"{error.seen}, on {fields['host']}"}
                if error.peer is not None:
                    fields["after"] = self.tally.of(error.peer)
                kind = "PeerLost"
            case PeerLost():
                others = [r for r in range(self._hosts.size) if r not in mine]
                fields |= {"peer": others[0], "what": "the connection to another host broke"}
                fields["fix"] = _FIX
                kind = "PeerLost"
            case CommTimeout():
                missing = error.missing if engine else tuple(mine[r] for r in error.missing)
                ranks = ", ".join(map(str, missing)) or "any"
                fields |= {"missing": missing, "elapsed_s": self.timeout_s}
                fields["what"] = f"rank{'s' if len(missing) > 1 else ''} {ranks} did not arrive"
                kind = "CommTimeout"
            case Desync():
                calls = error.calls if engine else {mine[r]: c for r, c in error.calls.items()}
                fields["calls"] = calls
                kind = "Desync"
            case Aborted():
                kind = "Aborted"
            case CommError():
                kind = "CommError"
            case _:
                kind = "InternalError"
        return Verdict(kind=kind, **fields)
