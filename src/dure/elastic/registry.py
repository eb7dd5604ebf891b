"""What ranks write in the store on their way to the next epoch, and who of them has ended.

Note "Registry". All is written once or only grows, so it can be read at any time and in any order:

    new, left           lists of tokens, by lines          member/TOKEN   who that is
    N/here/TOKEN        what it has after epoch N - 1       N/begun        epoch N - 1 has failed
    N/plan              epoch N                             at, done       the latest; the job's end

**Who has ended**: a process of this host, when the kernel says so; one of another host, when the
group says so, or has not heard of it for seconds; whoever has said goodbye; and a member whose rank
has come again, for a launcher gives a rank to a new process when the old one has ended. Whoever
sees a process of its host end says goodbye for it, because other hosts cannot see that.

What is decided with it, `council` tells.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import msgspec

from dure.elastic.roster import Here, Member, Plan
from dure.errors import StoreTimeout
from dure.store.base import Store
from dure.store.identity import alive

__all__ = ["LOOK", "Registry", "Unreached", "has_begun"]

LOOK = timedelta(milliseconds=10)
"""How long one look into the store waits for what is not there yet."""

_pack = msgspec.msgpack.encode
_read_here = msgspec.msgpack.Decoder(Here).decode
_read_member = msgspec.msgpack.Decoder(Member).decode
_read_plan = msgspec.msgpack.Decoder(Plan).decode

Unreached = Callable[[int], bool]
"""Tells of a rank of the last epoch whether its group takes it for lost."""


def has_begun(store: Store, number: int) -> bool:
    """Tell whether a rank has given up the epoch before this one."""
    return store.check([f"{number}/begun"])


class Registry:
    """What one process knows of the others.

    Args:
        store: The job's own keys; change it with `move`.
    """

    def __init__(self, store: Store) -> None:
        self._dead: set[str] = set()
        self._ranks: dict[str, int] = {}
        self.move(store, None)

    def move(self, store: Store, plan: Plan | None) -> None:
        """Go on in another store, after `plan`, which is the latest that this rank knows."""
        self.store = store
        store.append("new", b"")
        store.append("left", "".join(f"{token}\n" for token in self._dead))
        if plan is not None:
            self._offer(plan)
            if self.latest() < plan.number:  # newcomers look there
                store.set("at", str(plan.number))

    # ---- what this process says ----------------------------------------------------------------

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

    def announce(self, number: int, me: Member, here: Here) -> None:
        """Say that the epoch before `number` has ended for a member, and what it has.

        The first of two writes is to be answered: who reaches the store through a network that is
        cut in the other direction does not count as here, for nobody would meet it.
        """
        self.store.set(f"{number}/begun", b"")
        self.store.set(f"{number}/here/{me.token}", _pack(here))

    def propose(self, plan: Plan) -> None:
        """Offer an epoch, and tell newcomers that there is one by this number."""
        self._offer(plan)
        self.store.set("at", str(plan.number))

    def _offer(self, plan: Plan) -> None:
        self.store.compare_set(f"{plan.number}/plan", "", _pack(plan))

    # ---- what others have said -----------------------------------------------------------------

    def finished(self) -> bool:
        """Tell whether the job is done."""
        return self.store.check(["done"])

    def latest(self) -> int:
        """Return the number of a late epoch, if not of the latest; -1 where there is none."""
        return int(self.store.get("at")) if self.store.check(["at"]) else -1

    def plan(self, number: int, look: timedelta) -> Plan | None:
        """Return the plan of an epoch, if there is one within a moment."""
        key = f"{number}/plan"
        try:
            self.store.wait([key], look)
        except StoreTimeout:
            return None
        return _read_plan(self.store.get(key))

    def waiting(self, plan: Plan) -> bool:
        """Tell whether newcomers wait. Cost: one round trip where there are none."""
        return bool(set(self._tokens("new")) - set(plan.known)) and bool(self.newcomers(plan))

    def newcomers(self, last: Plan | None) -> list[Member]:
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

    def survivors(self, last: Plan) -> list[tuple[Member, Here]]:
        """Return who of an epoch that has ended is here, and what each has."""
        number = last.number + 1
        self._read_left()
        here = [
            m
            for m in last.members
            if not self.has_ended(m) and self.store.check([f"{number}/here/{m.token}"])
        ]
        values = self.store.multi_get([f"{number}/here/{m.token}" for m in here]) if here else []
        return [(m, _read_here(value)) for m, value in zip(here, values, strict=True)]

    def missing(self, last: Plan, unreached: Unreached) -> list[Member]:
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

    # ---- who has ended -------------------------------------------------------------------------

    def has_ended(self, member: Member) -> bool:
        """Tell whether a member is known to have ended; say goodbye for it if nobody else could."""
        if member.token not in self._dead and alive(member.process) is False:
            self._dead.add(member.token)
            self.leave(member)  # other hosts cannot see it
        return member.token in self._dead

    def ended(self, last: Plan, unreached: Unreached, severed: Unreached) -> frozenset[str]:
        """Return the tokens of members who are not merely silent."""
        return frozenset(
            m.token
            for rank, m in enumerate(last.members)
            if self.has_ended(m)
            or (alive(m.process) is None and unreached(rank) and not severed(rank))
        )

    def _tokens(self, key: str) -> list[str]:
        return self.store.get(key).decode().split()

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
