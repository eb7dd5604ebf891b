"""How ranks come to the next view: for whom they wait, and who decides.

A rank whose group has failed says that it is *here*, with what it has (`Progress`), and waits until
each other member of the last view is here too, or is known to have ended. The first rank that sees
it proposes the next view (`views.next_view`), with all who are here and all newcomers that wait;
the first proposal counts (one compare-and-set), so all take the same way. If a member ends while
the new group is made, that view has failed like any other, and the next one follows: there is no
second decision to take.

A newcomer writes itself into a list and waits for a view that has it among its members. Before the
first view, and where a view's members have all ended, newcomers decide among themselves.

**What is in the store** is written once or only grows, so it can be read at any time and in any
order, and written again when the answer to the first time was lost:

    new, left           lists of TOKEN:RANK, of TOKEN      member/TOKEN   who that is
    N/here/TOKEN        what it has after view N - 1       N/begun        view N - 1 has ended
    N/view              view N                             done           the job has ended

**Who has ended**: a process of this host, when the kernel says so; one of another host, when the
group says so, or has not heard of it for seconds; a process that has said goodbye; and a member
whose rank has come again, for a launcher gives a rank to a new process when the old one has ended.
A rank that sees a process of its host end says goodbye for it, because other hosts cannot see it.

A member that lives and does not come (it is stopped, or busy) is waited for `timeout_s`, then left
out; when it wakes up, it sees that, and comes back as a newcomer. There is one store, and it never
moves: ranks that cannot reach it cannot come to a view, so a network that is cut never leaves two
groups that both continue.

A member may also wait for one that is here already: in another group than the one that broke, or
for a message, where only the ranks that wait for a dead one notice its death. So a rank that waited
here for `_NUDGE_S` leaves its groups, which ends all waiting for it.

Cost:
    Six round trips to the store, and until the last rank comes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec

from dure.comm.creation import wait_watching
from dure.elastic.views import ElasticView, Progress, RankMember, next_view
from dure.errors import Aborted, PeerLost, RendezvousError, StoreTimeout
from dure.store.base import Store
from dure.store.identity import alive, myself
from dure.store.prefix import PrefixStore
from dure.trace import line

__all__ = ["GroupStore", "JobDone", "RankMembership"]

_LOOK = timedelta(milliseconds=10)
"""How long one look into the store waits for a missing key."""

_NEWCOMER_LOOK = timedelta(milliseconds=100)
_NUDGE_S = 1.0
_TELL_S = 0.1
_SETTLE_S = 1.0
"""How long newcomers wait for more of them, where all members of the last view have ended."""

_pack = msgspec.msgpack.encode
_read_progress = msgspec.msgpack.Decoder(Progress).decode
_read_member = msgspec.msgpack.Decoder(RankMember).decode
_read_view = msgspec.msgpack.Decoder(ElasticView).decode

Unreached = Callable[[int], bool]
"""Returns whether the group of a rank of the last view takes it for lost."""


class JobDone(Exception):
    """The job ended while this process waited to be let in."""


class RankMembership:
    """One process's side of the agreement.

    Args:
        store: The job's own keys.
        rank: The number that the launcher gave this process.
        expected: How many come to the first view.
        min_ranks: Fewer members are too few.
        timeout_s: How long to wait for members that live.
        enough_s: How long to wait for newcomers while there are too few.
        give_up: Returns whether a newcomer is to stop waiting.

    Attributes:
        me: This process, this time that it joins.
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
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.store, self._rank, self._expected = store, rank, max(expected, min_ranks)
        self._min_ranks, self._give_up = min_ranks, give_up
        self._timeout_s, self._enough_s = timeout_s, enough_s
        self._dead: set[str] = set()
        self._tell_at = 0.0
        self.me = self._new_self()
        for name in ("new", "left"):
            store.append(name, b"")  # so that both exist

    def _new_self(self) -> RankMember:
        return RankMember(uuid.uuid4().hex[:12], self._rank, myself())

    def _wait_for_more(self) -> None:
        """Report to the launcher that this rank waits for others: that is no hang."""
        now = time.monotonic()
        if now >= self._tell_at:
            self._tell_at = now + _TELL_S
            line.send_elastic()

    # ---- newcomers -----------------------------------------------------------------------------

    def register(self, member: RankMember) -> None:
        self.store.set(f"member/{member.token}", _pack(member))
        self.store.append("new", f"{member.token}:{member.rank}\n")

    def enter(self) -> ElasticView:
        """Come as a newcomer; return the view in which this process is a member.

        Raises:
            JobDone: The job has ended, or this process is to end.
            RendezvousError: The others did not come, or too few.
        """
        self.register(self.me)
        began = heard_at = time.monotonic()
        number, last = 0, None
        alone_since: float | None = None
        while True:
            view = self._view(number, _NEWCOMER_LOOK if alone_since is None else _LOOK)
            if view is not None:
                if view.rank_of(self.me.token) >= 0:
                    return view
                last, number, alone_since = view, number + 1, None
                heard_at = time.monotonic()
                continue
            if self._give_up() or self.store.check(["done"]):
                raise JobDone
            now = time.monotonic()
            if last is None or all(self.has_ended(m) for m in last.members):
                alone_since = alone_since or now
                self._wait_for_more()
                newcomers = self.newcomers(last)
                settled = last is not None and now - alone_since > _SETTLE_S
                wanted = self._min_ranks if settled else self._expected
                if len(newcomers) >= wanted or now - began > self._enough_s:
                    self.propose(next_view(last, [], newcomers, self._min_ranks))
            elif now - heard_at > self._timeout_s and not any(
                alive(m.process) for m in last.members
            ):
                raise RendezvousError(
                    "no rank lets this process into the group",
                    rank=self._rank,
                    elapsed_s=self._timeout_s,
                    seen=f"it is unknown whether these live: {', '.join(map(str, last.members))}",
                    fix="If their hosts are lost, start the job again; if a step of theirs takes "
                    "longer, raise Options(timeout=...).",
                )

    def newcomers(self, last: ElasticView | None) -> list[RankMember]:
        """Return the living newcomers that wait for a view."""
        known = set[str]() if last is None else set(last.known)
        fresh = [t for t in self._read_arrivals() if t not in known and t not in self._dead]
        values = self.store.multi_get([f"member/{t}" for t in fresh]) if fresh else []
        return [m for m in map(_read_member, values) if not self.has_ended(m)]

    # ---- the next view -------------------------------------------------------------------------

    def announce(self, last: ElasticView, progress: Progress) -> None:
        """Say that `last` has ended for this rank, and what it has.

        The first of two writes must be answered: a rank whose network is cut in the direction from
        the store to it does not count as here, for it could not join the others.
        """
        self.store.set(f"{last.number + 1}/begun", b"")
        self.store.set(_here(last, self.me), _pack(progress))

    def agree(
        self, last: ElasticView, unreached: Unreached, nudge: Callable[[], object] = lambda: None
    ) -> ElasticView:
        """Return the view after `last`, which has been announced to have ended.

        Args:
            last: The view that has ended.
            unreached: Returns whether a member on another host is lost.
            nudge: Called while others do not come: frees them if they wait for this rank.

        Raises:
            RendezvousError: Too few ranks are left.
        """
        began = time.monotonic()
        while (view := self._view(last.number + 1, timedelta(0))) is None:
            waited_s = time.monotonic() - began
            if self.missing(last, unreached) and waited_s < self._timeout_s:
                if waited_s > _NUDGE_S:
                    nudge()
                continue
            survivors, newcomers = self.survivors(last), self.newcomers(last)
            enough = len(survivors) + len(newcomers) >= self._min_ranks
            if enough or waited_s > self._enough_s:
                self.propose(next_view(last, survivors, newcomers, self._min_ranks))
            else:
                self._wait_for_more()
                time.sleep(_LOOK.total_seconds())
        if view.rank_of(self.me.token) >= 0:
            return view
        self.me = self._new_self()  # left out: it was taken for dead, or came too late
        return self.enter()

    def survivors(self, last: ElasticView) -> list[tuple[RankMember, Progress]]:
        """Return the members of a view that has ended which are here, and what each has."""
        self._read_arrivals()
        living = [m for m in last.members if not self.has_ended(m)]
        all_here = self.store.check([_here(last, m) for m in living])  # mostly: one round trip
        here = [m for m in living if all_here or self.store.check([_here(last, m)])]
        values = self.store.multi_get([_here(last, m) for m in here]) if here else []
        return list(zip(here, map(_read_progress, values), strict=True))

    def missing(self, last: ElasticView, unreached: Unreached) -> list[RankMember]:
        """Wait a moment; return the members that live and are not here."""
        awaited = [m for m in last.members if not self.has_ended(m)]
        try:
            self.store.wait([_here(last, m) for m in awaited], _LOOK)
            return []
        except StoreTimeout:
            self._read_arrivals()
        return [
            m
            for m in awaited
            if m.token not in self._dead
            and not self.store.check([_here(last, m)])
            and not (alive(m.process) is None and unreached(last.rank_of(m.token)))
        ]

    def propose(self, view: ElasticView) -> None:
        """Offer a view; the first that is offered counts."""
        self.store.compare_set(f"{view.number}/view", "", _pack(view))

    def _view(self, number: int, look: timedelta) -> ElasticView | None:
        """Return a view, if there is one within a moment.

        Raises:
            RendezvousError: It says that there can be no such group.
        """
        key = f"{number}/view"
        try:
            self.store.wait([key], look)
        except StoreTimeout:
            return None
        view = _read_view(self.store.get(key))
        if view.failure:
            raise RendezvousError(
                "the job cannot continue",
                rank=self._rank,
                seen=view.failure,
                fix="Start more ranks, let the launcher replace those that end (--max-restarts), "
                "or want fewer (min_ranks).",
            )
        return view

    def keys_of(self, view: ElasticView) -> GroupStore:
        return GroupStore(self.store, view, self._timeout_s)

    # ---- who has ended -------------------------------------------------------------------------

    def has_ended(self, member: RankMember) -> bool:
        """Whether a member is known to have ended; if this host's kernel says so, record that."""
        if member.token not in self._dead and alive(member.process) is False:
            self._dead.add(member.token)
            self.leave(member)  # other hosts cannot see it
        return member.token in self._dead

    def leave(self, member: RankMember) -> None:
        self.store.append("left", f"{member.token}\n")

    def finish(self) -> None:
        self.store.set("done", b"")

    def _read_arrivals(self) -> list[str]:
        """Return the tokens that have arrived, in order; note which members have ended."""
        words = self.store.get("new").decode().split()
        ranks = dict(word.split(":") for word in words)
        newest = {rank: token for token, rank in ranks.items()}
        self._dead.update(token for token, rank in ranks.items() if newest[rank] != token)
        self._dead.update(self.store.get("left").decode().split())
        return list(ranks)


def _here(last: ElasticView, member: RankMember) -> str:
    return f"{last.number + 1}/here/{member.token}"


class GroupStore(PrefixStore):
    """The keys in which a view's group is made; waiting in it ends when the view has failed.

    To make a group, ranks leave each other addresses in a store and wait for those of the others.
    If a member ends before it has left its own, the others would wait until the timeout; if one
    gives up, it leaves no more. So a rank that waits looks now and then whether all members live,
    as far as this host's kernel knows, and whether one has announced that the view has ended.
    """

    def __init__(self, job: Store, view: ElasticView, timeout_s: float) -> None:
        super().__init__(f"{view.number}/group", job)
        self._view, self._limit = view, timedelta(seconds=timeout_s)

    @property
    def timeout(self) -> timedelta:
        return self._limit

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = self.timeout if timeout is None else timeout
        wait_watching(self._store, self._full(keys), limit, [self])

    def get(self, key: str) -> bytes:
        self.wait([key])
        return super().get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return super().multi_get(keys)

    def look(self) -> None:
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
        if self._store.check([f"{self._view.number + 1}/begun"]):
            raise Aborted("another rank gave up making the group", world_size=len(members))
