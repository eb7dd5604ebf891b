"""How ranks come to the next epoch: for whom they wait, and who decides.

Note "Council". A rank whose group has failed says that it is *here*, with what it has (`Here`), and
waits until each other member of the last epoch is here too, or is known to have ended. Whoever sees
that first proposes the plan of the next epoch (`roster.next_plan`), with all who are here and all
newcomers that wait; the first proposal counts (one compare-and-set), so all take the same way. If a
member ends while the group of the new epoch is made, that epoch has failed like any other, and the
next one follows: there is no second decision to take.

A newcomer writes itself into a list and waits for a plan that has it among its members. Before the
first epoch, and where an epoch's members have all ended, newcomers decide among themselves.

What they tell each other, and how each knows who has ended, `registry` tells. A member that lives
and does not come (it is stopped, or busy) is waited for `patience_s`, then left out; when it wakes
up, it sees that, and comes back as a newcomer.

Of whom nothing is heard, and who is not known to have ended, may be another part of the job behind
a network that is cut. If the store can move, so that each part may find one, those who are here go
on only with the quorum (`roster.has_quorum`); without it they wait for `patience_s`, and end. The
first epoch needs one where the store has moved already: at the first store all can meet.

A member may also wait for one who is here already: in another group than the one that broke, or for
a message, where a death is told to those alone who wait for the dead. So whoever has waited here
for `_NUDGE_S` leaves its groups, which ends all waiting for it.

Cost: six round trips to the store, and until the last rank comes.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Container, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import timedelta

from dure.elastic.forming import EpochStore
from dure.elastic.registry import LOOK, Registry, Unreached
from dure.elastic.roster import Here, Member, Plan, has_quorum, next_plan
from dure.errors import RendezvousError, StoreLost
from dure.store.base import Store
from dure.store.identity import alive, myself

__all__ = ["Council", "JobDone"]

_NEWCOMER_LOOK = timedelta(milliseconds=100)
_NUDGE_S = 1.0
_SETTLE_S = 1.0
"""How long newcomers wait for more of them, where all members of the last epoch have ended."""

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

    store: InitVar[Store]
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
    _registry: Registry = field(init=False)
    _told_of_silence: bool = field(init=False, default=False)

    def __post_init__(self, store: Store) -> None:
        self.me = self._new_self()
        self._registry = Registry(store)

    def _new_self(self) -> Member:
        return Member(uuid.uuid4().hex[:12], self.rank, myself())

    def move(self, store: Store, plan: Plan | None) -> None:
        """Go on in another store, after `plan`, which is the latest that this rank knows."""
        self._registry.move(store, plan)

    # ---- coming and going ----------------------------------------------------------------------

    def enter(self) -> Plan:
        """Come as a newcomer; return the epoch in which this process is a member.

        Raises:
            JobDone: The job has ended meanwhile, or this process shall.
            RendezvousError: The others did not come, or too few.
            StoreLost: The store is lost, or the job is elsewhere.
        """
        registry = self._registry
        registry.come(self.me)
        began = time.monotonic()
        number = max(registry.latest(), 0)
        last: Plan | None = None
        alone_since, unheard_since = 0.0, began
        while True:
            plan = self._plan(number, _NEWCOMER_LOOK if alone_since == 0.0 else LOOK)
            if plan is not None:
                last, number, alone_since = plan, number + 1, 0.0
                unheard_since = time.monotonic()
                if self._is_in(plan):
                    return plan
                continue
            if self.give_up() or registry.finished():
                raise JobDone
            if self.elsewhere():
                raise StoreLost("the job has gone to another store", rank=self.rank)
            if last is None and registry.latest() > number:  # who trains has come to this store
                number = registry.latest()
                continue
            if last is None or all(registry.has_ended(m) for m in last.members):
                alone_since = alone_since or time.monotonic()
                newcomers = registry.newcomers(last)
                if self._has_quorum(last, newcomers, ()):
                    if self._newcomers_ready(last, len(newcomers), began, alone_since):
                        self._propose(last, [], newcomers)
                elif time.monotonic() - began > self.patience_s:
                    raise self._no_quorum("the other ranks")
            elif time.monotonic() - unheard_since > self.patience_s:
                self._check_heard_of(last)

    def _check_heard_of(self, last: Plan) -> None:
        """Raise if all who could let newcomers in may have gone with their hosts."""
        awaited = [m for m in last.members if not self._registry.has_ended(m)]
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
        self._registry.leave(self.me)

    def finish(self) -> None:
        """Say that the job is done: who waits to be let in need not wait any longer."""
        self._registry.finish()

    def waiting(self, plan: Plan) -> bool:
        """Tell whether newcomers wait. Cost: one round trip where there are none."""
        return self._registry.waiting(plan)

    # ---- the next epoch ------------------------------------------------------------------------

    def announce(self, last: Plan, here: Here) -> None:
        """Say that `last` has ended for this rank, and what it has."""
        self._registry.announce(last.number + 1, self.me, here)

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
        registry, number = self._registry, last.number + 1
        began = time.monotonic()
        look = timedelta(0)
        while (plan := self._plan(number, look)) is None:
            waited_s = time.monotonic() - began
            missing = registry.missing(last, unreached)
            if missing and waited_s < self.patience_s:
                look = timedelta(0)
                if waited_s > _NUDGE_S:
                    nudge()
                continue
            survivors = registry.survivors(last)
            newcomers = registry.newcomers(last)
            here = [*(member for member, _ in survivors), *newcomers]
            known = registry.ended(last, unreached, severed)
            if not self._has_quorum(last, here, known):
                self._wait_for_quorum(last, here, known, waited_s)
            elif len(survivors) + len(newcomers) >= self.min_ranks or waited_s > self.enough_s:
                self._propose(last, survivors, newcomers)
            look = LOOK
        if self._is_in(plan):
            return plan
        self.me = self._new_self()  # left out: it was taken for dead, or came too late
        return self.enter()

    def watched(self, plan: Plan) -> EpochStore:
        """Return the keys in which the group of an epoch is made."""
        return EpochStore(self._registry.store, plan, self.patience_s)

    # ---- plans ---------------------------------------------------------------------------------

    def _propose(
        self,
        last: Plan | None,
        survivors: Sequence[tuple[Member, Here]],
        newcomers: Sequence[Member],
    ) -> None:
        self._registry.propose(next_plan(last, survivors, newcomers, self.min_ranks))

    def _plan(self, number: int, look: timedelta) -> Plan | None:
        """Return the plan of an epoch, if there is one within a moment.

        Raises:
            RendezvousError: The plan says that there can be no such epoch.
        """
        plan = self._registry.plan(number, look)
        if plan is not None and plan.failure:
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

    def _newcomers_ready(
        self, last: Plan | None, found: int, began: float, alone_since: float
    ) -> bool:
        """Tell whether so many newcomers, who are on their own, wait for nobody else."""
        now = time.monotonic()
        if now - began > self.enough_s:
            return True
        if last is not None:
            return found >= self.min_ranks and now - alone_since > _SETTLE_S
        return found >= self.expected

    # ---- the quorum ----------------------------------------------------------------------------

    def _has_quorum(self, last: Plan | None, here: Sequence[Member], ended: Container[str]) -> bool:
        divided = self.astray() if last is None else self.divisible()
        return not divided or has_quorum(last, here, ended, self.expected)

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
