"""What ranks write in the store on their way to the next view, and who of them has ended.

All is written once or only grows, so it can be read at any time and in any order, and written again
when the answer to the first time was lost:

    new, left           lists of tokens, by lines          member/TOKEN   who that is
    N/here/TOKEN        what it has after view N - 1       N/begun        view N - 1 has ended
    N/view              view N                             at, done       the latest; the job's end

**Who has ended**: a process of this host, when the kernel says so; one of another host, when the
group says so, or has not heard of it for seconds; whoever has said goodbye; and a member whose rank
has come again, for a launcher gives a rank to a new process when the old one has ended. Whoever
sees a process of its host end says goodbye for it, because other hosts cannot see that.

What is decided with it, `membership` tells.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import msgspec

from dure.elastic.views import Member, Progress, View
from dure.errors import StoreTimeout
from dure.store.base import Store
from dure.store.identity import alive

__all__ = ["LOOK", "MemberTable", "Unreached"]

LOOK = timedelta(milliseconds=10)
"""How long one look into the store waits for what is not there yet."""

_pack = msgspec.msgpack.encode
_read_progress = msgspec.msgpack.Decoder(Progress).decode
_read_member = msgspec.msgpack.Decoder(Member).decode
_read_view = msgspec.msgpack.Decoder(View).decode

Unreached = Callable[[int], bool]
"""Tells of a rank of the last view whether its group takes it for lost."""


class MemberTable:
    """What one process knows of the others.

    Args:
        store: The job's own keys.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._dead: set[str] = set()
        self._ranks: dict[str, int] = {}
        self.probe()

    # ---- what this process says ----------------------------------------------------------------

    def probe(self) -> None:
        """Write nothing; so both lists are there, and the store is known to take what is written.

        Raises:
            StoreError: It does not.
        """
        self.store.append("new", b"")
        self.store.append("left", b"")

    def come(self, me: Member) -> None:
        """Write a newcomer down."""
        self.store.set(f"member/{me.token}", _pack(me))
        self.store.append("new", f"{me.token}\n")

    def leave(self, me: Member) -> None:
        """Say goodbye for a member."""
        self.store.append("left", f"{me.token}\n")

    def finish(self) -> None:
        """Say that the job is done."""
        self.store.set("done", b"")

    def announce(self, number: int, me: Member, progress: Progress) -> None:
        """Say that the view before `number` has ended for a member, and what it has.

        The first of two writes is to be answered: who reaches the store through a network that is
        cut in the other direction does not count as here, for nobody would meet it.
        """
        self.store.set(f"{number}/begun", b"")
        self.store.set(f"{number}/here/{me.token}", _pack(progress))

    def propose(self, view: View) -> None:
        """Offer a view, and tell newcomers that there is one by this number; the first counts."""
        self.store.compare_set(f"{view.number}/view", "", _pack(view))
        self.store.set("at", str(view.number))

    # ---- what others have said -----------------------------------------------------------------

    def finished(self) -> bool:
        """Tell whether the job is done."""
        return self.store.check(["done"])

    def begun(self, number: int) -> bool:
        """Tell whether a rank has given up the view before this one."""
        return self.store.check([f"{number}/begun"])

    def latest(self) -> int:
        """Return the number of a late view, if not of the latest; -1 where there is none."""
        return int(self.store.get("at")) if self.store.check(["at"]) else -1

    def view(self, number: int, look: timedelta) -> View | None:
        """Return a view, if there is one within a moment."""
        key = f"{number}/view"
        try:
            self.store.wait([key], look)
        except StoreTimeout:
            return None
        return _read_view(self.store.get(key))

    def waiting(self, view: View) -> bool:
        """Tell whether newcomers wait. Cost: one round trip where there are none."""
        return bool(set(self._tokens("new")) - set(view.known)) and bool(self.newcomers(view))

    def newcomers(self, last: View | None) -> list[Member]:
        """Return who waits to be let in, and lives."""
        tokens = self._tokens("new")
        self._read_left()
        known = set() if last is None else set(last.known)
        fresh = [t for t in tokens if t not in known and t not in self._dead]
        if not fresh:
            return []
        values = self.store.multi_get([f"member/{t}" for t in fresh])
        members = [_read_member(value) for value in values]
        return [m for m in members if not self.has_ended(m)]

    def survivors(self, last: View) -> list[tuple[Member, Progress]]:
        """Return who of a view that has ended is here, and what each has."""
        self._read_left()
        alive = [m for m in last.members if not self.has_ended(m)]
        keys = {m.token: f"{last.number + 1}/here/{m.token}" for m in alive}
        all_here = self.store.check(list(keys.values()))  # mostly, so one round trip for all
        here = [m for m in alive if all_here or self.store.check([keys[m.token]])]
        values = self.store.multi_get([keys[m.token] for m in here]) if here else []
        return [(m, _read_progress(value)) for m, value in zip(here, values, strict=True)]

    def missing(self, last: View, unreached: Unreached) -> list[Member]:
        """Wait a moment; return who lives and is not here."""
        number = last.number + 1
        awaited = [m for m in last.members if not self.has_ended(m)]
        keys = {m.token: f"{number}/here/{m.token}" for m in awaited}
        try:
            self.store.wait(list(keys.values()), LOOK)
            return []
        except StoreTimeout:
            self._read_left()
        return [
            m
            for m in awaited
            if m.token not in self._dead
            and not self.store.check([keys[m.token]])
            and not (alive(m.process) is None and unreached(last.rank_of(m.token)))
        ]

    def has_ended(self, member: Member) -> bool:
        """Tell whether a member is known to have ended; say goodbye for it if nobody else could."""
        if member.token not in self._dead and alive(member.process) is False:
            self._dead.add(member.token)
            self.leave(member)  # other hosts cannot see it
        return member.token in self._dead

    def _tokens(self, key: str) -> list[str]:
        """Return a list's tokens, each once, in their order."""
        return list(dict.fromkeys(self.store.get(key).decode().split()))

    def _read_left(self) -> None:
        """Learn who has said goodbye, and whose rank has come again."""
        self._dead.update(self._tokens("left"))
        tokens = self._tokens("new")
        fresh = [t for t in tokens if t not in self._ranks]
        values = self.store.multi_get([f"member/{t}" for t in fresh]) if fresh else []
        self._ranks |= {t: _read_member(v).rank for t, v in zip(fresh, values, strict=True)}
        latest: dict[int, str] = {}
        for token in tokens:
            before = latest.get(self._ranks[token])
            if before is not None:
                self._dead.add(before)
            latest[self._ranks[token]] = token
