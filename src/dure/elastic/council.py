"""How ranks come to the next epoch: what they tell each other in the store, and who decides.

Note "Council". A rank whose group has failed says that it is *here*, with what it has (`Here`), and
waits until each other member of the last epoch is here too, or is known to have ended. Whoever sees
that first proposes the plan of the next epoch (`roster.next_plan`), with all who are here and all
newcomers that wait; the first proposal counts (one compare-and-set), so all take the same way. If a
member ends while the group of the new epoch is made, that epoch has failed like any other, and the
next one follows: there is no second decision to take.

A newcomer writes itself into a list and waits for a plan that has it among its members. Before the
first epoch, and where an epoch's members have all ended, newcomers decide among themselves.

Who has ended: a process of this host, when the kernel says so; one of another host, when the group
says so, or has not heard of it for seconds; whoever has said goodbye; and a member whose rank has
come again, for a launcher gives a rank to a new process when the old one has ended. A member that
lives and does not come (it is stopped, or busy) is waited for `patience_s`, then left out; when it
wakes up, it sees that, and comes back as a newcomer.

Of whom nothing is heard, and who is not known to have ended, may be another part of the job behind
a network that is cut. If the store can move, so that each part may find one, those who are here go
on only with the quorum (`roster.has_quorum`); without it they wait for `patience_s`, and end. The
first epoch needs one where the store has moved already: at the first store all can meet.

A member may also wait for one who is here already: in another group than the one that broke, or for
a message, where a death is told to those alone who wait for the dead. So whoever has waited here
for `_NUDGE_S` leaves its groups, which ends all waiting for it.

    new, left           lists of tokens, by lines          member/TOKEN   who that is
    N/here/TOKEN        what it has after epoch N - 1       N/begun        epoch N - 1 has failed
    N/plan              epoch N                             at, done       the latest; the job's end

Cost: five round trips to the store, and until the last rank comes.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec

from dure.elastic.roster import Here, Member, Plan, has_quorum, next_plan
from dure.errors import Aborted, PeerLost, RendezvousError, StoreLost, StoreTimeout
from dure.store.base import Store
from dure.store.identity import alive, myself
from dure.store.prefix import PrefixStore

__all__ = ["Council", "EpochStore", "JobDone", "Unreached"]

_LOOK = timedelta(milliseconds=10)
_NEWCOMER_LOOK = timedelta(milliseconds=100)
_WATCH_S = 0.02
_NUDGE_S = 1.0
_SETTLE_S = 1.0
"""How long newcomers wait for more of them, where all members of the last epoch have ended."""

_pack = msgspec.msgpack.encode
_read_here = msgspec.msgpack.Decoder(Here).decode
_read_member = msgspec.msgpack.Decoder(Member).decode
_read_plan = msgspec.msgpack.Decoder(Plan).decode

Unreached = Callable[[int], bool]
"""Tells of a rank of the last epoch whether its group takes it for lost."""


_log = logging.getLogger("dure.elastic")


class JobDone(Exception):
    """The job ended while this process waited to be let in."""


@dataclass(slots=True)
class Council:
    """One process's side of the agreement.

    Args:
        store: The job's own keys; change it with `move`.
        rank: What the launcher calls this process.
        expected: How many come to the first epoch.
        min_ranks: Fewer members are too few.
        patience_s: How long to wait for members that live.
        enough_s: How long to wait for newcomers while there are too few.
        give_up: Tells a newcomer that it shall not wait any longer.
        elsewhere: Tells that the job's store is another one by now, though this one answers.
        divisible: Tells whether another part of the job could have a store of its own.
        astray: Tells whether this store is not the job's first.
    """

    store: Store
    rank: int
    expected: int
    min_ranks: int = 1
    patience_s: float = 300.0
    enough_s: float = 30.0
    give_up: Callable[[], bool] = bool
    elsewhere: Callable[[], bool] = bool
    divisible: Callable[[], bool] = bool
    astray: Callable[[], bool] = bool
    me: Member = field(init=False)
    _dead: set[str] = field(init=False, default_factory=set[str])
    _ranks: dict[str, int] = field(init=False, default_factory=dict[str, int])
    _told_of_silence: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.me = self._new_self()
        self.move(self.store, None)

    def _new_self(self) -> Member:
        return Member(uuid.uuid4().hex[:12], self.rank, myself())

    def move(self, store: Store, plan: Plan | None) -> None:
        """Go on in another store, after `plan`, which is the latest that this rank knows."""
        self.store = store
        store.append("new", b"")
        store.append("left", "".join(f"{token}\n" for token in self._dead))
        if plan is not None:
            store.compare_set(f"{plan.number}/plan", "", _pack(plan))
            if self._at() < plan.number:  # newcomers look there
                store.set("at", str(plan.number))

    def _at(self) -> int:
        """Return the number of a late epoch, if not of the latest; -1 where there is none."""
        return int(self.store.get("at")) if self.store.check(["at"]) else -1

    # ---- coming and going ----------------------------------------------------------------------

    def enter(self) -> Plan:
        """Come as a newcomer; return the epoch in which this process is a member.

        Raises:
            JobDone: The job has ended meanwhile, or this process shall.
            RendezvousError: The others did not come, or too few.
            StoreLost: The store is lost, or the job is elsewhere.
        """
        store, me = self.store, self.me
        store.set(f"member/{me.token}", _pack(me))
        store.append("new", f"{me.token}\n")
        began = time.monotonic()
        number = max(self._at(), 0)
        last: Plan | None = None
        alone_since, unheard_since = 0.0, began
        while True:
            plan = self._plan(number, _NEWCOMER_LOOK if alone_since == 0.0 else _LOOK)
            if plan is not None:
                last, number, alone_since = plan, number + 1, 0.0
                unheard_since = time.monotonic()
                if self._is_in(plan):
                    return plan
                continue
            if self.give_up() or store.check(["done"]):
                raise JobDone
            if self.elsewhere():
                raise StoreLost("the job has gone to another store", rank=self.rank)
            if last is None and self._at() > number:  # who trains has come to this store
                number = self._at()
                continue
            if last is None or all(self._has_ended(m) for m in last.members):
                alone_since = alone_since or time.monotonic()
                newcomers = self._newcomers(last)
                if self._has_quorum(last, newcomers, ()):
                    if self._newcomers_ready(last, began, alone_since):
                        self._propose(last, [], newcomers)
                elif time.monotonic() - began > self.patience_s:
                    raise self._no_quorum("the other ranks")
            elif time.monotonic() - unheard_since > self.patience_s:
                self._check_heard_of(last)

    def _check_heard_of(self, last: Plan) -> None:
        """Raise if all who could let newcomers in may have gone with their hosts."""
        awaited = [m for m in last.members if not self._has_ended(m)]
        if any(alive(m.process) for m in awaited):
            return
        raise RendezvousError(
            "nobody lets this process into the group",
            rank=self.rank,
            elapsed_s=self.patience_s,
            seen=f"nothing is known of {', '.join(map(str, awaited))}",
            fix="If their hosts are lost, start the job again; if a step of theirs takes longer, "
            "raise Options(timeout=...).",
        )

    def leave(self) -> None:
        """Say that this process takes part no more."""
        self.store.append("left", f"{self.me.token}\n")

    def finish(self) -> None:
        """Say that the job is done: who waits to be let in need not wait any longer."""
        self.store.set("done", b"")

    def waiting(self, plan: Plan) -> bool:
        """Tell whether newcomers wait. Cost: one round trip where there are none."""
        return bool(self._tokens("new")[0] - set(plan.known)) and bool(self._newcomers(plan))

    # ---- the next epoch ------------------------------------------------------------------------

    def announce(self, last: Plan, here: Here) -> None:
        """Say that `last` has ended for this rank, and what it has."""
        number = last.number + 1
        self.store.multi_set(
            [f"{number}/here/{self.me.token}", f"{number}/begun"], [_pack(here), b""]
        )

    def agree(
        self,
        last: Plan,
        unreached: Unreached,
        nudge: Callable[[], object] = bool,
        severed: Unreached = bool,
    ) -> Plan:
        """Return the epoch after `last`, which has been announced to have ended.

        Args:
            last: The epoch that has ended.
            unreached: Tells of a member on another host whether it is lost.
            nudge: Called while others do not come: frees them if they wait for this rank.
            severed: Tells of a member that is unreached whether its host fell silent, and may live.

        Raises:
            RendezvousError: Too few ranks are left, or they may be the smaller part of the job.
        """
        number = last.number + 1
        began = time.monotonic()
        look = timedelta(0)
        while (plan := self._plan(number, look)) is None:
            waited_s = time.monotonic() - began
            missing = self._missing(last, unreached)
            if missing and waited_s < self.patience_s:
                look = timedelta(0)
                if waited_s > _NUDGE_S:
                    nudge()
                continue
            survivors = self._survivors(last)
            newcomers = self._newcomers(last)
            here = [*(member for member, _ in survivors), *newcomers]
            known = self._known_to_have_ended(last, unreached, severed)
            if not self._has_quorum(last, here, known):
                self._wait_for_quorum(last, here, known, waited_s)
            elif len(survivors) + len(newcomers) >= self.min_ranks or waited_s > self.enough_s:
                self._propose(last, survivors, newcomers)
            look = _LOOK
        if self._is_in(plan):
            return plan
        self.me = self._new_self()  # left out: it was taken for dead, or came too late
        return self.enter()

    # ---- the quorum ----------------------------------------------------------------------------

    def _has_quorum(self, last: Plan | None, here: Sequence[Member], ended: Container[str]) -> bool:
        divided = self.astray() if last is None else self.divisible()
        return not divided or has_quorum(last, here, ended, self.expected)

    def _known_to_have_ended(
        self, last: Plan, unreached: Unreached, severed: Unreached
    ) -> frozenset[str]:
        """Return the tokens of members who are not merely silent."""
        return frozenset(
            m.token
            for rank, m in enumerate(last.members)
            if self._has_ended(m)
            or (alive(m.process) is None and unreached(rank) and not severed(rank))
        )

    def _wait_for_quorum(
        self, last: Plan, here: Sequence[Member], ended: Container[str], waited_s: float
    ) -> None:
        """Say once for whom these ranks wait, and raise when they have waited for long enough."""
        if waited_s > self.patience_s:
            tokens = {m.token for m in here}
            silent = [m for m in last.members if m.token not in tokens and m.token not in ended]
            raise self._no_quorum(", ".join(map(str, silent)))
        if not self._told_of_silence:
            self._told_of_silence = True
            if here and here[0].token == self.me.token:
                _log.warning(
                    "nothing is heard of %d ranks, which may live behind a network that is cut; "
                    "the %d that are here are not more than half, and wait for them (%g s)",
                    *(len(last.members) - len(here), len(here), self.patience_s),
                )

    def _no_quorum(self, silent: str) -> RendezvousError:
        return RendezvousError(
            "these ranks may be the smaller part of a job whose network is cut",
            rank=self.rank,
            elapsed_s=self.patience_s,
            seen=f"nothing is heard of {silent}",
            fix="See whether those hosts live, and whether the network is whole; if they are "
            "dead, start the job again. --rdzv-conf quorum=0 lets any part go on.",
        )

    def _missing(self, last: Plan, unreached: Unreached) -> list[Member]:
        """Wait a moment; return who lives and is not here."""
        number = last.number + 1
        awaited = [m for m in last.members if not self._has_ended(m)]
        keys = {m.token: f"{number}/here/{m.token}" for m in awaited}
        try:
            self.store.wait(list(keys.values()), _LOOK)
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

    def _survivors(self, last: Plan) -> list[tuple[Member, Here]]:
        number = last.number + 1
        self._read_left()
        here = [
            m
            for m in last.members
            if not self._has_ended(m) and self.store.check([f"{number}/here/{m.token}"])
        ]
        values = self.store.multi_get([f"{number}/here/{m.token}" for m in here]) if here else []
        return [(m, _read_here(value)) for m, value in zip(here, values, strict=True)]

    def _propose(
        self,
        last: Plan | None,
        survivors: Sequence[tuple[Member, Here]],
        newcomers: Sequence[Member],
    ) -> None:
        plan = next_plan(last, survivors, newcomers, self.min_ranks)
        self.store.compare_set(f"{plan.number}/plan", "", _pack(plan))
        self.store.set("at", str(plan.number))

    def _plan(self, number: int, look: timedelta) -> Plan | None:
        """Return the plan of an epoch, if there is one within a moment.

        Raises:
            RendezvousError: The plan says that there can be no such epoch.
        """
        key = f"{number}/plan"
        try:
            self.store.wait([key], look)
        except StoreTimeout:
            return None
        plan = _read_plan(self.store.get(key))
        if plan.failure:
            raise RendezvousError(
                "the job cannot go on",
                rank=self.rank,
                seen=plan.failure,
                fix="Start more ranks, let the launcher replace those that end (--max-restarts), "
                "or want fewer (min_ranks).",
            )
        return plan

    def _is_in(self, plan: Plan) -> bool:
        return plan.rank_of(self.me.token) >= 0

    # ---- newcomers -----------------------------------------------------------------------------

    def _newcomers(self, last: Plan | None) -> list[Member]:
        """Return who waits to be let in, and lives."""
        _, tokens = self._tokens("new")
        self._read_left()
        known = set() if last is None else set(last.known)
        fresh = [t for t in tokens if t not in known and t not in self._dead]
        if not fresh:
            return []
        values = self.store.multi_get([f"member/{t}" for t in fresh])
        members = [_read_member(value) for value in values]
        return [m for m in members if not self._has_ended(m)]

    def _newcomers_ready(self, last: Plan | None, began: float, alone_since: float) -> bool:
        """Tell whether newcomers that are on their own wait for nobody else."""
        found = len(self._newcomers(last))
        now = time.monotonic()
        if now - began > self.enough_s:
            return True
        if last is not None:
            return found >= self.min_ranks and now - alone_since > _SETTLE_S
        return found >= self.expected

    # ---- who has ended -------------------------------------------------------------------------

    def _tokens(self, key: str) -> tuple[set[str], list[str]]:
        tokens = self.store.get(key).decode().split()
        return set(tokens), tokens

    def _read_left(self) -> None:
        """Learn who has said goodbye, and whose rank has come again."""
        self._dead |= self._tokens("left")[0]
        _, tokens = self._tokens("new")
        fresh = [t for t in tokens if t not in self._ranks]
        values = self.store.multi_get([f"member/{t}" for t in fresh]) if fresh else []
        self._ranks |= {t: _read_member(v).rank for t, v in zip(fresh, values, strict=True)}
        latest: dict[int, str] = {}
        for token in tokens:
            before = latest.get(self._ranks[token])
            if before is not None:
                self._dead.add(before)
            latest[self._ranks[token]] = token

    def _has_ended(self, member: Member) -> bool:
        if member.token not in self._dead and alive(member.process) is False:
            self._dead.add(member.token)
            self.store.append("left", f"{member.token}\n")  # other hosts cannot see it
        return member.token in self._dead

    def watched(self, plan: Plan) -> EpochStore:
        """Return the keys in which the group of an epoch is made."""
        return EpochStore(self, plan)


class EpochStore(PrefixStore):
    """The keys in which an epoch's group is made; waiting in it ends when the epoch has failed."""

    def __init__(self, council: Council, plan: Plan) -> None:
        super().__init__(f"{plan.number}/group", council.store)
        self._council, self._plan = council, plan

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait: as long as members that live are waited for."""
        return timedelta(seconds=self._council.patience_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all `keys` exist; raise when a member has ended, or has given up."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit.total_seconds()
        while True:
            left_s = deadline - time.monotonic()
            try:
                return super().wait(keys, timedelta(seconds=max(0.0, min(left_s, _WATCH_S))))
            except StoreTimeout:
                if left_s <= _WATCH_S:
                    raise
            self._look()

    def get(self, key: str) -> bytes:
        """Return the value of `key`; wait for it as `wait` does."""
        self.wait([key])
        return super().get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`; wait for them as `wait` does."""
        self.wait(keys)
        return super().multi_get(keys)

    def _look(self) -> None:
        """Raise if the group will not come about."""
        number, members = self._plan.number, self._plan.members
        for rank, member in enumerate(members):
            if alive(member.process) is False:
                raise PeerLost(
                    f"{member} ended before the group was made",
                    peer=rank,
                    pid=member.process.pid,
                    host=member.process.host,
                    world_size=len(members),
                )
        if self.underlying_store.check([f"{number + 1}/begun"]):
            raise Aborted("another rank gave up making the group", world_size=len(members))
