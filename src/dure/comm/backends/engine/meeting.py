"""Ranks meet in the store before NCCL makes a communicator of them.

NCCL makes a communicator at its ranks' first operation, and blocks the host of each until all have
called one. This wait has no limit, and an abort does not end it: torch has no handle of a
communicator before it is made. So the ranks first wait for each other in the group's store, with
the group's timeout. There a late rank is a `CommTimeout`, a dead one a `PeerLost`, and ranks that
wait for each other are a `Desync`; in NCCL all of them begin at the same time.

*Deadlocks of hosts.* In a ring in which every rank sends first, each host waits for the next rank
to make their communicator. A host that waits writes a note into the store: for which communicator,
for which ranks, and which communicators it has made. Rank p is *blocked by* rank q if p waits for
q, and q's note does not have p's communicator. Ranks that are blocked by each other in a circle are
deadlocked, even if notes are old: assume that a wait of the circle has ended. Then q has made p's
communicator after its own note, so q's wait had ended before p's; and so on around the circle, so
that p's wait had ended before it ended.

Cost:
    Four requests to the store, once for each communicator. A rank that waits has more: those that
    search for deadlocks are rarer the more ranks there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import msgspec

from dure.comm.backends.abort import AbortRecord
from dure.errors import DureError, PeerLost, RendezvousTimeout
from dure.store.base import Store
from dure.store.gathering import Gathering, wait_for_verdicts

if TYPE_CHECKING:
    from dure.comm.backends.engine.work import EngineState, ExitRecords

__all__ = ["Meetings", "Note", "blocked_hosts", "encode"]

_LOOK_S = 0.05
_LONGEST_LOOK_S = 0.5
"""How often a host that waits looks whether it still can: at growing intervals, up to this one."""
_NOTE_S = 0.2
"""After how long a host that waits writes a note."""
_SEARCH_S_PER_RANK = 0.01
"""How often a host that waits searches the store for deadlocks and for ranks that have left, times
the ranks of the communicator: so the number of requests of all ranks does not grow with it."""
_ALL = "all"
"""The key of the communicator of all ranks."""


class Note(msgspec.Struct, frozen=True):
    """What a rank's host waits for: the other ranks of a communicator, to make it.

    Attributes:
        key: Of the communicator.
        missing: The ranks that have not come, as ranks of the group.
        made: Keys of all communicators that the rank has made, this one too.
        op: The first operation.
    """

    key: str
    missing: list[int]
    made: list[str]
    op: str


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Note).decode


class _NoteStore(Protocol):
    """The part of a store that is read."""

    missing_keys: Callable[[Sequence[str]], tuple[str, ...]]
    multi_get: Callable[[Sequence[str]], list[bytes]]


def _note_of(rank: int) -> str:
    return f"meeting/note/{rank}"


def blocked_hosts(store: _NoteStore, rank: int, note: Note) -> dict[int, str]:
    """Return the operations of hosts that wait for each other, by rank, if `rank` waits for them.

    Args:
        store: Has the notes of the other ranks.
        rank: This rank.
        note: Its note.
    """
    notes, path = {rank: note}, [rank]
    asked, searched = {rank}, {rank}
    while path:
        blocked = notes[path[-1]]
        unread = [r for r in blocked.missing if r not in asked]
        asked.update(unread)
        notes.update(_read_notes(store, unread))
        blocking = [r for r in blocked.missing if r in notes and blocked.key not in notes[r].made]
        first = next((r for r in blocking if r in path), None)
        if first is not None:
            circle = path[path.index(first) :]
            return {
                each: f"{notes[each].op} (its first; waits for rank {after})"
                for each, after in zip(circle, [*circle[1:], circle[0]], strict=True)
            }
        further = next((r for r in blocking if r not in searched), None)
        if further is None:
            path.pop()
        else:
            searched.add(further)
            path.append(further)
    return {}


def _read_notes(store: _NoteStore, ranks: Sequence[int]) -> dict[int, Note]:
    """Return the notes of those ranks that have written one; two requests."""
    keys = {_note_of(rank): rank for rank in ranks}
    missing = {*store.missing_keys([*keys])} if keys else set()
    written = [key for key in keys if key not in missing]
    found = store.multi_get(written) if written else []
    return {keys[key]: _decode(packed) for key, packed in zip(written, found, strict=True)}


class Meetings:
    """The meetings of one rank in one group. Threads: one at a time.

    Args:
        store: Of the group.
        state: Of the engine.
        exits: The exit records, if ranks write them.
    """

    def __init__(self, store: Store, state: EngineState, exits: ExitRecords | None) -> None:
        self._store, self._state, self._exits = store, state, exits
        self._made: list[str] = []

    def met(self) -> None:
        """Note that the communicator of all ranks was made without a meeting."""
        self._made.append(_ALL)

    def meet(self, peer: int | None, op: str, timeout: timedelta) -> None:
        """Wait for the other ranks of a communicator, unless they have met before.

        Args:
            peer: The other rank of the communicator for single messages of two ranks, which a group
                of two ranks has beside that of all ranks, too. None for that of all ranks.
            op: The operation that needs it, for errors.
            timeout: How long to wait.

        Raises:
            CommTimeout: A rank did not come in time.
            PeerLost: The process of a rank has ended, or it has left the group.
            Desync: This rank waits for ranks that wait for each other.
            Aborted: This rank has left the group in the meantime.
            CommError: A rank that was waited for has failed.
        """
        ranks = [*range(self._state.size)] if peer is None else sorted((self._state.rank, peer))
        key = _ALL if peer is None else ":".join(map(str, ranks))
        if key not in self._made:
            self._made.append(key)
            meeting = _Meeting(self._store, self._state, self._exits, Note(key, [], [], op), ranks)
            meeting.run([*self._made], timeout)


class _Meeting:
    """One meeting; see `Meetings.meet`."""

    def __init__(
        self,
        store: Store,
        state: EngineState,
        exits: ExitRecords | None,
        note: Note,
        ranks: Sequence[int],
    ) -> None:
        self._store, self._state, self._exits = store, state, exits
        self._note, self._ranks, self._op = note, [*ranks], note.op
        self._began = time.monotonic()
        self._look_s, self._is_published = 0.0, False
        self._search_at = self._began + _NOTE_S
        self._gathering = Gathering(
            store, f"meeting/{note.key}", self._ranks.index(state.rank), len(ranks), None,
            group=state.name,
        )  # fmt: skip

    def run(self, made: list[str], timeout: timedelta) -> None:
        """Wait for the ranks; a note whose wait has failed stays: others are in the same circle."""
        self._note = msgspec.structs.replace(self._note, made=made)
        try:
            if wait_for_verdicts([self._gathering], timeout, self._watch) is not None:
                raise self._error()
        except BaseException as error:
            self._gathering.give_up(error)
            raise
        if self._is_published:  # it waits for none now; others may be about to read it
            self._publish([])

    def _publish(self, missing: list[int]) -> None:
        self._note, self._is_published = msgspec.structs.replace(self._note, missing=missing), True
        self._store.set(_note_of(self._state.rank), encode(self._note))

    def _watch(self) -> float:
        """Look whether this rank may still wait; return the seconds until the next look."""
        state = self._state
        if state.left.is_set() or state.record is not None:
            raise state.error(self._op, began=self._began)
        if time.monotonic() >= self._search_at:
            self._search()
            self._search_at = time.monotonic() + _SEARCH_S_PER_RANK * len(self._ranks)
        self._look_s = min(2 * self._look_s, _LONGEST_LOOK_S) or _LOOK_S
        return self._look_s

    def _search(self) -> None:
        """Raise if this rank waits for a deadlock, or for a rank that has left."""
        state = self._state
        keys = {self._gathering.entry_key(n): rank for n, rank in enumerate(self._ranks)}
        missing = [keys[key] for key in self._store.missing_keys([*keys])]
        if missing != self._note.missing:
            self._publish(missing)
        if calls := blocked_hosts(self._store, state.rank, self._note):
            raise self._deadlock(calls)
        left = frozenset() if self._exits is None else self._exits.have_left()
        for rank in left.intersection(missing):
            record = AbortRecord.gone(rank)
            raise record.error(**state.where(self._op, began=self._began))

    def _deadlock(self, calls: dict[int, str]) -> DureError:
        named = dict(sorted(calls.items()))
        record = AbortRecord(
            kind="Desync",
            what="deadlock: ranks wait for each other",
            calls=named,
            seen="; ".join(f"rank {rank}: {text}" for rank, text in named.items()),
            fix="Let one of these ranks receive first, or send in both directions with "
            "batch_isend_irecv. A group's first batch needs all its ranks, unless a collective "
            "came before. NCCL would wait forever.",
        )
        return record.error(**self._state.where(self._op, began=self._began))

    def _error(self) -> DureError:
        """Return the error for a meeting that has failed."""
        verdict, found = self._gathering.verdict, self._gathering.error(0.0)
        assert verdict is not None
        if isinstance(found, RendezvousTimeout):
            missing = tuple(self._ranks[rank] for rank in verdict.missing)
            record = AbortRecord(
                kind="CommTimeout",
                what="not all ranks called their first operation in time",
                missing=missing,
                seen=f"missing {[*missing]}",
                fix="See what the missing ranks do, or raise the group's timeout.",
            )
        elif isinstance(found, PeerLost):
            rank = self._ranks[verdict.lost]
            what = f"the process of rank {rank} ended"
            record = AbortRecord(kind="PeerLost", what=what, peer=rank, seen=verdict.why)
        else:
            rank = self._ranks[verdict.failed]
            what = f"rank {rank} gave up its first operation"
            record = AbortRecord(kind="CommError", what=what, peer=rank, seen=verdict.why)
        return record.error(**self._state.where(self._op, began=self._began))
