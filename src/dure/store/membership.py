"""The meeting: how ranks that share a store agree on who they are, or learn why they cannot.

Every rank carries out the same steps on a few keys:

1. Its *generation* is how often its number has left this store before (`next/R`). Ranks that
   destroy their world and meet again therefore meet under new keys, each at its own pace.
2. It claims its number (`G/member/R`) by compare-and-set, so of two ranks with one number exactly
   one wins, and the other knows by whom it was beaten.
3. It compares its world size with that of the first to come (`G/world`).
4. It counts itself (`G/count`); the last to come writes the *verdict* (`G/verdict`): met.
5. Everybody waits for the verdict, then reads all members.

Whoever finds a mistake writes it into the verdict instead, unless there is one already. So all
ranks that wait learn of it at once, in the same words, and long before any timeout. Meanwhile the
two lowest ranks that came look once a second whether a rank that came has died since.

Cost: seven round trips a rank, of which one is parked until the last rank comes.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from datetime import timedelta

import msgspec

from dure.errors import RendezvousError, RendezvousTimeout, StoreError, StoreTimeout
from dure.store.base import Store
from dure.store.identity import Identity, alive

__all__ = ["Meeting", "Member", "Verdict", "contest", "leave", "meet", "object_to"]

_WATCH_S = 1.0
_CONTEST = timedelta(seconds=1)
_NAMED = 8
"""How many ranks a message names before it only counts them."""


class Member(msgspec.Struct, array_like=True, frozen=True):
    """A rank and the process that is it.

    Attributes:
        rank: Its number.
        world_size: How many ranks it believes in.
        process: Who it is.
        token: Sets apart the times that one process joins.
    """

    rank: int
    world_size: int
    process: Identity
    token: str

    @property
    def pid(self) -> int:
        """The process's number."""
        return self.process.pid

    @property
    def host(self) -> str:
        """The host's name."""
        return self.process.host

    @property
    def host_id(self) -> str:
        """Equal for members that can share memory."""
        return self.process.host_id

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})"


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """How a meeting ended, for all its ranks; `what` is empty if they met."""

    what: str = ""
    seen: str = ""
    fix: str = ""
    timed_out: bool = False
    came: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()

    def raise_for(self, me: Member) -> None:
        """Raise the error that this verdict is, if it is one, as seen by `me`."""
        if not self.what:
            return
        where: dict[str, object] = {"rank": me.rank, "world_size": me.world_size}
        where |= {"seen": self.seen, "fix": self.fix}
        if self.timed_out:
            raise RendezvousTimeout(self.what, came=self.came, missing=self.missing, **where)
        raise RendezvousError(self.what, **where)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A meeting that took place."""

    generation: int
    members: tuple[Member, ...]


_pack = msgspec.msgpack.encode
_read_member = msgspec.msgpack.Decoder(Member).decode
_read_verdict = msgspec.msgpack.Decoder(Verdict).decode


def meet(store: Store, me: Member, deadline: float, active: set[str]) -> Meeting:
    """Meet the other ranks.

    Args:
        store: Holds this meeting's keys alone (a `PrefixStore`).
        me: This rank.
        deadline: When to give up (`time.monotonic`).
        active: Tokens of the meetings that this process is still in.

    Raises:
        RendezvousError: Two ranks have one number, ranks disagree on the world size, or a rank
            died. Every rank that waits gets the same error.
        RendezvousTimeout: Not all came; says who did.
    """
    generation = _claim(store, me, active)
    try:
        return _gather(store, me, generation, deadline)
    except BaseException:
        with contextlib.suppress(StoreError):
            leave(store, me.rank, generation)
        raise


def leave(store: Store, rank: int, generation: int) -> None:
    """Let `rank` go on to the next generation when it joins again."""
    store.set(f"next/{rank}", str(generation + 1))


def object_to(store: Store, me: Member, verdict: Verdict) -> None:
    """Tell the ranks that wait why `me` cannot take part; it has claimed no number."""
    _agree(store, store.add("next/0", 0), verdict)


def contest(store: Store, me: Member) -> None:
    """Raise the error about another process that claims the number of `me`; claim nothing.

    Raises:
        RendezvousError: Names both; those who wait get it, too.
        StoreTimeout: Nobody claims it.
    """
    generation = store.add(f"next/{me.rank}", 0)
    key = f"{generation}/member/{me.rank}"
    store.wait([key], _CONTEST)  # the other may be about to claim it
    verdict = _rivalry(_read_member(store.get(key)), me)
    _agree(store, generation, verdict)
    verdict.raise_for(me)


def _claim(store: Store, me: Member, active: set[str]) -> int:
    """Claim this rank's number; return the generation."""
    generation = store.add(f"next/{me.rank}", 0)
    mine = _pack(me)
    while (there := store.compare_set(f"{generation}/member/{me.rank}", "", mine)) != mine:
        other = _read_member(there)
        if other.process == me.process and other.token not in active:
            generation += 1  # this process was here before, and forgot to leave
            continue
        verdict = _rivalry(other, me)
        _agree(store, generation, verdict)
        verdict.raise_for(me)
    return generation


def _rivalry(other: Member, me: Member) -> Verdict:
    if alive(other.process) is False:
        return Verdict(
            f"rank {me.rank} of this job has died",
            seen=f"{other} is no more, and its number is still taken",
            fix="Start the whole job again, with a new port or file.",
        )
    return Verdict(
        f"two processes have the number {me.rank}",
        seen=f"{other.process}, and {me.process}",
        fix="Give every process its own RANK, from 0 to WORLD_SIZE - 1; if the first one belongs "
        "to another job, choose another MASTER_PORT or file.",
    )


def _gather(store: Store, me: Member, generation: int, deadline: float) -> Meeting:
    """Agree on the world size, wait for the verdict and read the members."""
    said = store.compare_set(f"{generation}/world", "", str(me.world_size))
    if said != str(me.world_size).encode():
        mine = _disagreement(_came(store, generation))
        agreed = _agree(store, generation, mine)
        (agreed if agreed.what else mine).raise_for(me)
    elif store.add(f"{generation}/count", 1) == me.world_size:
        _agree(store, generation, Verdict())
    _await_verdict(store, generation, me, deadline).raise_for(me)
    keys = [f"{generation}/member/{rank}" for rank in range(me.world_size)]
    members = tuple(_read_member(value) for value in store.multi_get(keys))
    return Meeting(generation=generation, members=members)


def _await_verdict(store: Store, generation: int, me: Member, deadline: float) -> Verdict:
    key = f"{generation}/verdict"
    while True:
        left_s = deadline - time.monotonic()
        try:
            store.wait([key], timedelta(seconds=max(0.0, min(left_s, _WATCH_S))))
            return _read_verdict(store.get(key))
        except StoreTimeout:
            came = _came(store, generation)
        if left_s <= _WATCH_S:
            return _agree(store, generation, _timeout(came, me))
        if me.rank in [member.rank for member in came[:2]]:
            dead = [member for member in came if alive(member.process) is False]
            if dead:
                return _agree(store, generation, _death(dead, came))


def _agree(store: Store, generation: int, verdict: Verdict) -> Verdict:
    """Propose a verdict; return the one that counts, which is the first."""
    return _read_verdict(store.compare_set(f"{generation}/verdict", "", _pack(verdict)))


def _came(store: Store, generation: int) -> list[Member]:
    start = f"{generation}/member/"
    keys = [key for key in store.list_keys() if key.startswith(start)]
    members = [_read_member(value) for value in store.multi_get(keys)]
    return sorted(members, key=lambda member: member.rank)


def _timeout(came: list[Member], me: Member) -> Verdict:
    ranks = tuple(member.rank for member in came)
    missing = tuple(rank for rank in range(me.world_size) if rank not in ranks)
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    named = ", ".join(map(str, missing[:_NAMED])) + more
    return Verdict(
        f"only {len(came)} of {me.world_size} ranks came in time",
        seen=f"missing: {named}; came: {_named(came)}",
        fix="Look at the output of the missing ranks; check that each was started, with this "
        "address and its own RANK; give a longer timeout if they start slowly.",
        timed_out=True,
        came=ranks,
        missing=missing,
    )


def _death(dead: list[Member], came: list[Member]) -> Verdict:
    return Verdict(
        "a rank died before all had come",
        seen=f"{_named(dead)}; came so far: {_named(came)}",
        fix="Look at that process's own error.",
    )


def _disagreement(came: list[Member]) -> Verdict:
    says: dict[int, list[Member]] = {}
    for member in came:
        says.setdefault(member.world_size, []).append(member)
    return Verdict(
        "the ranks disagree on the world size",
        seen="; ".join(f"{size} says {_named(group)}" for size, group in sorted(says.items())),
        fix="Start all ranks with the same WORLD_SIZE (or world_size=).",
    )


def _named(members: list[Member]) -> str:
    more = f" and {len(members) - _NAMED} more" if len(members) > _NAMED else ""
    return ", ".join(map(str, members[:_NAMED])) + more
