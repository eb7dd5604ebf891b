"""How ranks come to the next view: for whom they wait, and who decides.

Note "Membership". A rank whose group has failed says that it is *here*, with what it has
(`Progress`), and waits until each other member of the last view is here too, or is known to have
ended. Whoever sees that first proposes the next view (`views.next_view`), with all who are here and
all newcomers that wait; the first proposal counts (one compare-and-set), so all take the same way.
If a member ends while the new group is made, that view has failed like any other, and the next one
follows: there is no second decision to take.

A newcomer writes itself into a list and waits for a view that has it among its members. Before the
first view, and where a view's members have all ended, newcomers decide among themselves.

What they tell each other, and how each knows who has ended, `member_table` tells. A member that
lives and does not come (it is stopped, or busy) is waited for `timeout_s`, then left out; when it
wakes up, it sees that, and comes back as a newcomer.

There is one store, and it never moves: ranks that cannot reach it cannot come to a view, so a
network that is cut never leaves two groups that both go on.

A member may also wait for one who is here already: in another group than the one that broke, or for
a message, where a death is told to those alone who wait for the dead. So whoever has waited here
for `_NUDGE_S` leaves its groups, which ends all waiting for it.

Cost: six round trips to the store, and until the last rank comes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta

from dure.elastic.member_table import LOOK, MemberTable, Unreached
from dure.elastic.views import Member, Progress, View, next_view
from dure.errors import Aborted, PeerLost, RendezvousError, StoreTimeout
from dure.store.base import Store
from dure.store.identity import alive, myself
from dure.store.prefix import PrefixStore

__all__ = ["GroupStore", "JobDone", "Membership"]

_NEWCOMER_LOOK = timedelta(milliseconds=100)
_NUDGE_S = 1.0
_WATCH_S = 0.02
_SETTLE_S = 1.0
"""How long newcomers wait for more of them, where all members of the last view have ended."""


class JobDone(Exception):
    """The job ended while this process waited to be let in."""


class Membership:
    """One process's side of the agreement.

    Args:
        store: The job's own keys.
        rank: What the launcher calls this process.
        expected: How many come to the first view.
        min_ranks: Fewer members are too few.
        timeout_s: How long to wait for members that live.
        enough_s: How long to wait for newcomers while there are too few.
        give_up: Tells a newcomer that it shall not wait any longer.

    Attributes:
        me: This process, this time that it joins.
        table: What all have written.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        expected: int,
        *,
        min_ranks: int = 1,
        timeout_s: float = 300.0,
        enough_s: float = 30.0,
        give_up: Callable[[], bool] = bool,
    ) -> None:
        self._rank, self._expected, self._min_ranks = rank, expected, min_ranks
        self._timeout_s, self._enough_s, self._give_up = timeout_s, enough_s, give_up
        self.table = MemberTable(store)
        self.me = self._new_self()

    def _new_self(self) -> Member:
        return Member(uuid.uuid4().hex[:12], self._rank, myself())

    # ---- newcomers -----------------------------------------------------------------------------

    def enter(self) -> View:
        """Come as a newcomer; return the view in which this process is a member.

        Raises:
            JobDone: The job has ended meanwhile, or this process shall.
            RendezvousError: The others did not come, or too few.
        """
        table = self.table
        table.come(self.me)
        began = heard_at = time.monotonic()
        number = max(table.latest(), 0)
        last: View | None = None
        alone_since: float | None = None
        while True:
            view = self._view(number, _NEWCOMER_LOOK if alone_since is None else LOOK)
            if view is not None:
                if self._is_in(view):
                    return view
                last, number, alone_since = view, number + 1, None
                heard_at = time.monotonic()
                continue
            if self._give_up() or table.finished():
                raise JobDone
            now = time.monotonic()
            if last is None or all(table.has_ended(m) for m in last.members):
                alone_since = alone_since or now
                newcomers = table.newcomers(last)
                settled = last is not None and now - alone_since > _SETTLE_S
                enough = len(newcomers) >= (self._min_ranks if settled else self._expected)
                if enough or now - began > self._enough_s:
                    self._propose(last, [], newcomers)
            elif now - heard_at > self._timeout_s:
                self._require_life(last)

    def _require_life(self, last: View) -> None:
        """Raise if all who could let newcomers in may have gone with their hosts."""
        awaited = [m for m in last.members if not self.table.has_ended(m)]
        if any(alive(m.process) for m in awaited):
            return
        raise RendezvousError(
            "nobody lets this process into the group",
            rank=self._rank,
            elapsed_s=self._timeout_s,
            seen=f"nothing is known of {', '.join(map(str, awaited))}",
            fix="If their hosts are lost, start the job again; if a step of theirs takes longer, "
            "raise Options(timeout=...).",
        )

    # ---- the next view -------------------------------------------------------------------------

    def announce(self, last: View, progress: Progress) -> None:
        """Say that `last` has ended for this rank, and what it has."""
        self.table.announce(last.number + 1, self.me, progress)

    def agree(self, last: View, unreached: Unreached, nudge: Callable[[], object] = bool) -> View:
        """Return the view after `last`, which has been announced to have ended.

        Args:
            last: The view that has ended.
            unreached: Tells of a member on another host whether it is lost.
            nudge: Called while others do not come: frees them if they wait for this rank.

        Raises:
            RendezvousError: Too few ranks are left.
        """
        table, number = self.table, last.number + 1
        began = time.monotonic()
        look = timedelta(0)
        while (view := self._view(number, look)) is None:
            waited_s = time.monotonic() - began
            if table.missing(last, unreached) and waited_s < self._timeout_s:
                if waited_s > _NUDGE_S:
                    nudge()
                look = timedelta(0)
                continue
            survivors, newcomers = table.survivors(last), table.newcomers(last)
            enough = len(survivors) + len(newcomers) >= self._min_ranks
            if enough or waited_s > self._enough_s:
                self._propose(last, survivors, newcomers)
            look = LOOK
        if self._is_in(view):
            return view
        self.me = self._new_self()  # left out: it was taken for dead, or came too late
        return self.enter()

    def keys_of(self, view: View) -> GroupStore:
        """Return the keys in which the group of a view is made."""
        return GroupStore(self.table, view, self._timeout_s)

    # ---- views ---------------------------------------------------------------------------------

    def _propose(
        self,
        last: View | None,
        survivors: Sequence[tuple[Member, Progress]],
        newcomers: Sequence[Member],
    ) -> None:
        self.table.propose(next_view(last, survivors, newcomers, self._min_ranks))

    def _view(self, number: int, look: timedelta) -> View | None:
        """Return a view, if there is one within a moment.

        Raises:
            RendezvousError: It says that there can be no such group.
        """
        view = self.table.view(number, look)
        if view is not None and view.failure:
            raise RendezvousError(
                "the job cannot go on",
                rank=self._rank,
                seen=view.failure,
                fix="Start more ranks, let the launcher replace those that end (--max-restarts), "
                "or want fewer (min_ranks).",
            )
        return view

    def _is_in(self, view: View) -> bool:
        return view.rank_of(self.me.token) >= 0


class GroupStore(PrefixStore):
    """The keys in which a view's group is made; waiting in it ends when the view has failed.

    To make a group, ranks leave each other addresses in a store and wait for those of the others.
    If a member ends before it has left its own, the others would wait for the whole timeout; if one
    gives up, it leaves no more. So whoever waits looks every `_WATCH_S` whether all members live,
    as far as this host's kernel can tell, and whether one has announced that the view has ended.

    Args:
        table: What members have written.
        view: The view.
        timeout_s: How long to wait for members that live.
    """

    def __init__(self, table: MemberTable, view: View, timeout_s: float) -> None:
        super().__init__(f"{view.number}/group", table.store)
        self._table, self._view, self._limit = table, view, timedelta(seconds=timeout_s)

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait: as long as members that live are waited for."""
        return self._limit

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
            self._require_all()

    def get(self, key: str) -> bytes:
        """Return the value of `key`; wait for it as `wait` does."""
        self.wait([key])
        return super().get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`; wait for them as `wait` does."""
        self.wait(keys)
        return super().multi_get(keys)

    def _require_all(self) -> None:
        """Raise if the group will not come about."""
        members = self._view.members
        for rank, member in enumerate(members):
            if alive(member.process) is False:
                raise PeerLost(
                    f"{member} ended before the group was made",
                    peer=rank,
                    pid=member.process.pid,
                    host=member.process.host,
                    world_size=len(members),
                )
        if self._table.begun(self._view.number + 1):
            raise Aborted("another rank gave up making the group", world_size=len(members))
