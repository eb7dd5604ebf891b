"""Rendezvous: how ranks that share a store agree on their numbers, or learn why they cannot.

Every rank carries out the same steps on a few keys:

1. Its *generation* is how often its number has left this store before (`next/R`). So ranks that
   destroy their world and meet again use new keys, each at its own pace.
2. It claims its number (`G/member/R`) by compare-and-set, so of two ranks with one number exactly
   one wins, and the other learns which process has the number.
3. It compares its world size and its build with those of the first rank to arrive (`G/world`).
4. It counts itself (`G/count`); the last rank reads all members and writes the *outcome*
   (`G/outcome`): met, with the table of members (store/members.py).
5. Every rank waits for the outcome and reads it.

A rank that finds a mistake writes it into the outcome instead, unless there is one already. So all
waiting ranks learn of it at once, in the same words, and long before any timeout. In the meantime
the first two ranks by `G/count` check once a second whether a rank of their host that arrived has
died since, and at the end of the timeout they report who is missing. They read each member once.
The others only wait.

If all numbers are claimed then, and the count is not complete, a rank has ended between its claim
and its count, or is about to be counted. So the outcome is a *roll call*: every rank that reads it
answers (`G/here/R`) and waits for the second outcome (`G/outcome/2`). If all have answered they
have met, otherwise the ranks that have not are missing.

Cost:
    Six round trips per rank, one of which is parked until the last rank arrives, and the table of
    members: some ten bytes per rank on hosts of eight ranks. One rank reads all members.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec

from dure.errors import RendezvousError, RendezvousTimeout, StoreError, StoreLost, StoreTimeout
from dure.store.base import DEFAULT_TIMEOUT, Store
from dure.store.builds import DIFFERENT, SAME_BUILD, differing, listed, own_build
from dure.store.handlers import found_by_handler
from dure.store.identity import Identity, alive, myself
from dure.store.init_method import InitMethod, read_init_method
from dure.store.lifetime import at_process_end
from dure.store.members import MemberTable, RendezvousMember
from dure.store.memory import HashStore
from dure.store.network import NetworkStore
from dure.store.prefix import PrefixStore

__all__ = ["Rendezvous", "RendezvousMember", "rendezvous", "rendezvous_alone", "rendezvous_at"]

_GOODBYE = timedelta(seconds=1)
_WATCH_S = 1.0
_PROPOSAL_S = 1.0
"""How much longer than its timeout a rank waits for the outcome of the two that watch."""

_ANSWER_S = 5.0
"""How long ranks may take to answer a roll call."""

_LATE_S = 1.0
"""How long rank 0 serves after a rendezvous that failed, for ranks that arrive late."""


@dataclass(slots=True, kw_only=True, eq=False)
class Rendezvous:
    """A rendezvous that took place, from one rank's side.

    Attributes:
        store: Keys of this rendezvous alone, shared by its ranks; live until all have left.
        rank: This rank.
        world_size: How many there are.
        members: The ranks, by number.
        alone: The other ranks do not exist, and are never waited for; see `rendezvous_alone`.
    """

    store: Store
    rank: int
    world_size: int
    members: MemberTable
    alone: bool = False
    _holder: Identity | None = field(default=None, repr=False)  # of the store, if it is a rank
    _base: Store | None = field(default=None, repr=False)  # what was opened for it
    _leave: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def same_host(self) -> bool:
        """Whether all ranks can share memory (see `Identity.host_id`)."""
        return self.local_world_size == self.world_size

    @property
    def same_process(self) -> bool:
        """Whether all ranks are threads of this process."""
        return self.members.num_processes() == 1

    @property
    def local_world_size(self) -> int:
        """How many ranks share this rank's host."""
        return self.members.num_on_host_of(self.rank)

    @property
    def reachable(self) -> bool:
        """Whether the store may still answer: the rank that holds it is not known to have ended."""
        return self._holder is None or alive(self._holder) is not False

    @property
    def holder(self) -> Identity | None:
        """The process of the rank that serves the store; None if no rank does."""
        return self._holder

    @property
    def held_on_this_host(self) -> bool:
        """Whether a rank serves the store whose end this process can see."""
        return self._holder is not None and alive(self._holder) is not None

    def ended(self, rank: int) -> bool:
        """Return whether the process of `rank` is known to have ended."""
        return alive(self.members.process(rank)) is False

    def require_store(self, op: str) -> None:
        """Raise `StoreLost` if the rank that serves the store is known to have ended."""
        if self.reachable:
            return
        raise StoreLost(
            "the process that served the store has ended",
            op=op,
            rank=self.rank,
            peer=next((m.rank for m in self.members if m.process == self._holder), None),
            seen=f"{self._holder} served it, for no launcher does",
            fix="Start the job with `dure run`, whose store outlives every rank, or meet in a "
            "file, in etcd, or in a store of your own (init_method=, store=).",
        )

    def go_on_with(self, ranks: Sequence[int], name: str) -> None:
        """Go on with `ranks` alone, numbered from 0 in this order, on keys of their own.

        Collective:
            All of `ranks` call, with equal arguments.
        """
        self.members = self.members.select(ranks)
        self.rank, self.world_size = list(ranks).index(self.rank), len(ranks)
        self.store = PrefixStore(name, self.store)

    def forget(self) -> None:
        """Leave without writing: the store is lost, or no ranks will meet under these keys again.

        The store that was met in stays open.
        """
        _open.discard(self)

    def close(self) -> None:
        """Leave; safe to call twice, and without effect in a forked child.

        A store that the caller gave stays open.
        """
        if self not in _open or self.members.process(self.rank).pid != os.getpid():
            return
        self.forget()
        if self._base is not None:
            self._base.set_timeout(_GOODBYE)
        self._leave()
        if self._base is not None:
            with contextlib.suppress(StoreError):
                self._base.close()


_open: set[Rendezvous] = set()
"""The rendezvous that ranks of this process are in."""


def rendezvous(
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    store: Store | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    group_name: str = "",
    gpus: tuple[str, ...] = (),
) -> Rendezvous:
    """Meet the other ranks of the job.

    Args:
        init_method: `env://` (also if None), `tcp://HOST:PORT`, `file:///PATH` or
            `etcd://HOST:PORT/JOB`, all but the first optionally with `?rank=R&world_size=N`.
        rank: This rank; -1 if `init_method` or the environment has it.
        world_size: How many ranks there are; -1 likewise.
        store: A store to meet in, instead of `init_method`.
        timeout: How long to wait for all ranks; also the timeout of the store.
        group_name: Sets several meetings in one store apart.
        gpus: Those of this rank; the others find them in `members`.

    Raises:
        RendezvousError: Two ranks have one number, ranks disagree on the world size, or a rank
            died: every rank that waits gets the same error. Or this rank cannot take part; the
            text names what to do.
        RendezvousTimeout: `came` and `missing` list the ranks that did and did not.

    Collective:
        All ranks call. A rank that does not is named in the others' `RendezvousTimeout`.
    """
    if store is None and init_method is not None:
        found = found_by_handler(init_method, rank, world_size, timeout=timeout)
        if found is not None:
            store, rank, world_size = next(found)
    if store is None:
        method = read_init_method(init_method, rank, world_size)
        return rendezvous_at(method, timeout, group_name, gpus)
    if rank == -1 or world_size == -1:
        raise RendezvousError(
            "rank and world_size must be given with store=",
            fix="Pass rank=... and world_size=... to init_process_group.",
        )
    me = _myself(rank, world_size, gpus)
    keys = PrefixStore(f"dure/store/{group_name}", store)
    try:
        return _join(keys, me, time.monotonic() + timeout.total_seconds())
    except StoreError as error:
        raise _translated(error, me) from None


def rendezvous_at(
    method: InitMethod,
    timeout: timedelta = DEFAULT_TIMEOUT,
    group_name: str = "",
    gpus: tuple[str, ...] = (),
) -> Rendezvous:
    """Meet the other ranks at an endpoint that is known; otherwise as `rendezvous`."""
    deadline = time.monotonic() + timeout.total_seconds()
    me, endpoint = _myself(method.rank, method.world_size, gpus), method.endpoint
    base: Store | None = None
    try:
        base = endpoint.open(me.rank, me.world_size, max(0.1, timeout.total_seconds()))
        keys = PrefixStore(f"dure/{endpoint.name}/{group_name}", base)
        result = _join(keys, me, deadline, base, endpoint.held_by_rank_0)
    except BaseException as error:
        if isinstance(base, NetworkStore) and base.serves:
            # Ranks that arrive late must still learn why. The end of the process waits for timers.
            threading.Timer(_LATE_S, base.close).start()
        elif base is not None:
            base.close()
        if isinstance(error, StoreError):
            raise _translated(error, me) from None
        raise
    base.set_timeout(timeout)
    return result


def rendezvous_alone(rank: int, world_size: int) -> Rendezvous:
    """Return the rendezvous of a rank whose peers do not exist; all members are this process.

    Raises:
        RendezvousError: The rank or the world size cannot be.
    """
    me = _myself(rank, world_size)
    return Rendezvous(
        store=HashStore(),
        rank=rank,
        world_size=world_size,
        members=MemberTable.alone(me, world_size),
        alone=True,
    )


def _myself(rank: int, world_size: int, gpus: tuple[str, ...] = ()) -> RendezvousMember:
    """Return this rank as a member.

    Raises:
        RendezvousError: The rank or the world size cannot be.
    """
    me = RendezvousMember(rank, world_size, myself(), uuid.uuid4().hex, own_build(), gpus)
    if 0 <= rank < world_size:
        return me
    what = f"rank {rank} cannot be in a job of {world_size}"
    if world_size < 1:
        what = f"a world size of {world_size} is not possible"
    seen = f"{me.process} was started with RANK={rank} and WORLD_SIZE={world_size}"
    raise _error(me, what, seen=seen, fix="Ranks go from 0 to WORLD_SIZE - 1.")


def _error(me: RendezvousMember, what: str, **details: Any) -> RendezvousError:
    """Make an error as seen by `me`; one with `missing` is a timeout."""
    make = RendezvousTimeout if "missing" in details else RendezvousError
    return make(what, rank=me.rank, world_size=me.world_size, **details)


def _translated(error: StoreError, me: RendezvousMember) -> RendezvousError:
    """Turn an error of the store into one of the rendezvous."""
    details: dict[str, Any] = {"elapsed_s": error.elapsed_s, "seen": error.seen, "fix": error.fix}
    if isinstance(error, StoreTimeout):
        details |= {"came": (me.rank,), "missing": (0,)}
    return _error(me, error.what, **details)


class _RendezvousOutcome(msgspec.Struct, array_like=True, frozen=True):
    """How a rendezvous ended, for all its ranks; `what` is empty if they met.

    Then `members` is their packed table. If `is_roll_call` another outcome follows. Every version
    reads it, so fields are only appended.
    """

    what: str = ""
    seen: str = ""
    fix: str = ""
    timed_out: bool = False
    came: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    members: bytes = b""
    is_roll_call: bool = False

    def raise_for(self, me: RendezvousMember) -> None:
        """Raise the error that this is, if it is one, as seen by `me`."""
        details: dict[str, Any] = {"seen": self.seen, "fix": self.fix}
        if self.timed_out:
            details |= {"came": self.came, "missing": self.missing}
        if self.what:
            raise _error(me, self.what, **details)


_pack = msgspec.msgpack.encode
_read_member = msgspec.msgpack.Decoder(RendezvousMember).decode
_read_outcome = msgspec.msgpack.Decoder(_RendezvousOutcome).decode


def _join(
    keys: Store,
    me: RendezvousMember,
    deadline: float,
    base: Store | None = None,
    held_by_rank_0: bool = False,
) -> Rendezvous:
    """Meet in `keys`; `base` is the store that was opened for them, if it is not the caller's."""
    generation = keys.add(f"next/{me.rank}", 0)

    def leave() -> None:
        """Let this rank join the next generation when it joins again."""
        with contextlib.suppress(StoreError):
            keys.set(f"next/{me.rank}", str(generation + 1))

    _claim(keys, me, generation)
    try:
        if held_by_rank_0 and me.rank == 0:
            _check_serves(keys, me, generation, base)
        members = _gather(keys, me, generation, deadline)
    except BaseException:
        leave()
        raise
    result = Rendezvous(
        store=PrefixStore(f"{generation}/keys", keys),
        rank=me.rank,
        world_size=me.world_size,
        members=members,
        _holder=members.process(0) if held_by_rank_0 else None,
        _base=base,
        _leave=leave,
    )
    _open.add(result)
    return result


def _claim(keys: Store, me: RendezvousMember, generation: int) -> None:
    """Claim this rank's number."""
    mine = _pack(me)
    there = keys.compare_set(f"{generation}/member/{me.rank}", "", mine)
    if there != mine:
        outcome = _rivalry(_read_member(there), me)
        _agree(keys, generation, outcome)
        outcome.raise_for(me)


def _check_serves(keys: Store, me: RendezvousMember, generation: int, base: Store | None) -> None:
    """Refuse to begin, on all ranks, in a store that a process of another job serves.

    That process has left its own rendezvous, or this rank could not have claimed its number. A
    process whose rendezvous failed serves a little longer; a job that began in its store would end
    with it. In the first generation no rank has left: the process that serves is about to claim the
    number 0, too, and then all ranks learn that two have it.
    """
    if generation > 0 and isinstance(base, NetworkStore) and not base.serves:
        what = "the port of rank 0 is taken by the store of another job"
        fix = "End that job's processes and start again, or choose another MASTER_PORT."
        before = [member for member in _came(keys, generation - 1) if member.rank == 0]
        seen = base.endpoint + (f", by {listed(before)}" if before else "")
        taken = _RendezvousOutcome(what, seen, fix)
        _agree(keys, generation, taken)
        taken.raise_for(me)


def _gather(keys: Store, me: RendezvousMember, generation: int, deadline: float) -> MemberTable:
    """Agree on world size and build, wait for the outcome and read the members."""
    mine = f"{me.world_size} {me.build.protocol} {me.build.version}".encode()
    if keys.compare_set(f"{generation}/world", "", mine) != mine:
        found = _disagreement(_came(keys, generation))
        _agree(keys, generation, found).raise_for(me)
        found.raise_for(me)  # the others have met without this rank
    arrived = keys.add(f"{generation}/count", 1)
    if arrived == me.world_size:
        outcome = _agree(keys, generation, _met(keys, generation, me.world_size))
    else:
        outcome = _await_outcome(keys, generation, me, deadline, watches=arrived <= 2)
    if outcome.is_roll_call:
        outcome = _answer(keys, generation, me, calls=arrived <= 2)
    outcome.raise_for(me)
    return MemberTable.unpack(outcome.members)


def _met(keys: Store, generation: int, world_size: int) -> _RendezvousOutcome:
    """Return the outcome of a rendezvous to which all ranks have come."""
    packed = keys.multi_get([f"{generation}/member/{rank}" for rank in range(world_size)])
    return _RendezvousOutcome(members=MemberTable.of(map(_read_member, packed)).pack())


def _await_outcome(
    keys: Store, generation: int, me: RendezvousMember, deadline: float, watches: bool
) -> _RendezvousOutcome:
    """Wait for the outcome; propose one at the deadline or, if this rank watches, after a death."""
    key = f"{generation}/outcome"
    end = deadline if watches else deadline + _PROPOSAL_S
    arrivals = _Arrivals(keys, generation, me) if watches else None
    while True:
        left_s = max(0.0, end - time.monotonic())
        wait_s = min(left_s, _WATCH_S) if watches else left_s
        try:
            keys.wait([key], timedelta(seconds=wait_s))
            return _read_outcome(keys.get(key))
        except StoreTimeout:
            if wait_s == left_s:
                return _agree(keys, generation, _ended_early(keys, generation, me))
        if arrivals is not None and (dead := arrivals.dead()):
            return _agree(keys, generation, _death(dead, _came(keys, generation)))


def _ended_early(keys: Store, generation: int, me: RendezvousMember) -> _RendezvousOutcome:
    """Return the outcome at the limit of a rank that still waits."""
    if keys.add(f"{generation}/count", 0) == me.world_size:
        return _met(keys, generation, me.world_size)  # the last rank has not written it
    came = _came(keys, generation)
    if len(came) == me.world_size:
        return _RendezvousOutcome(is_roll_call=True)
    return _timeout(came, me)


def _answer(keys: Store, generation: int, me: RendezvousMember, calls: bool) -> _RendezvousOutcome:
    """Answer a roll call; return the second outcome.

    Args:
        keys: Of the rendezvous.
        generation: Of this rank.
        me: This rank.
        calls: Whether this rank waits for the answers, and not for another rank that does.
    """
    key, here = f"{generation}/outcome/2", f"{generation}/here/{me.rank}"
    answers = [f"{generation}/here/{rank}" for rank in range(me.world_size)]
    keys.set(here, "")
    with contextlib.suppress(StoreTimeout):
        if not calls:
            keys.wait([key], timedelta(seconds=_ANSWER_S + _PROPOSAL_S))
            return _read_outcome(keys.get(key))
        keys.wait(answers, timedelta(seconds=_ANSWER_S))
    silent = set(keys.missing_keys(answers))
    if silent:
        came = [
            m
            for m, each in zip(_came(keys, generation), answers, strict=True)
            if each not in silent
        ]
        outcome = _timeout(came, me)
    else:
        outcome = _met(keys, generation, me.world_size)
    return _read_outcome(keys.compare_set(key, "", _pack(outcome)))


class _Arrivals:
    """The processes of this rank's host that have arrived; each member is read once."""

    def __init__(self, keys: Store, generation: int, me: RendezvousMember) -> None:
        self._keys, self._host_id = keys, me.host_id
        self._unread = [f"{generation}/member/{rank}" for rank in range(me.world_size)]
        self._here: dict[Identity, list[RendezvousMember]] = {}

    def dead(self) -> list[RendezvousMember]:
        """Read the members that have arrived; return those whose process has ended."""
        missing = self._keys.missing_keys(self._unread)
        absent = set(missing)
        arrived = [key for key in self._unread if key not in absent]
        for value in self._keys.multi_get(arrived) if arrived else ():
            member = _read_member(value)
            if member.host_id == self._host_id:
                self._here.setdefault(member.process, []).append(member)
        self._unread = list(missing)
        return [m for process, ms in self._here.items() if alive(process) is False for m in ms]


def _agree(keys: Store, generation: int, outcome: _RendezvousOutcome) -> _RendezvousOutcome:
    """Propose an outcome; return the one that counts, which is the first."""
    return _read_outcome(keys.compare_set(f"{generation}/outcome", "", _pack(outcome)))


def _came(keys: Store, generation: int) -> list[RendezvousMember]:
    start = f"{generation}/member/"
    names = [key for key in keys.list_keys() if key.startswith(start)]
    members = [_read_member(value) for value in keys.multi_get(names)]
    return sorted(members, key=lambda member: member.rank)


def _rivalry(other: RendezvousMember, me: RendezvousMember) -> _RendezvousOutcome:
    if alive(other.process) is False:
        return _RendezvousOutcome(
            f"rank {me.rank} of this job has died",
            seen=f"{other} is no more, and its number is still taken",
            fix="Start all ranks again, with a new port or file.",
        )
    return _RendezvousOutcome(
        f"two processes have the number {me.rank}",
        seen=f"{other.process}, and {me.process}",
        fix="Give every process its own RANK, from 0 to WORLD_SIZE - 1; if the first one belongs "
        "to another job, choose another MASTER_PORT or file.",
    )


def _timeout(came: list[RendezvousMember], me: RendezvousMember) -> _RendezvousOutcome:
    ranks = tuple(member.rank for member in came)
    missing = tuple(sorted(set(range(me.world_size)).difference(ranks)))
    return _RendezvousOutcome(
        f"only {len(came)} of {me.world_size} ranks came in time",
        seen=f"missing: {listed(missing)}; came: {listed(came)}",
        fix="Look at the output of the missing ranks; check that each was started, with this "
        "address and its own RANK; give a longer timeout if they start slowly.",
        timed_out=True,
        came=ranks,
        missing=missing,
    )


def _death(dead: list[RendezvousMember], came: list[RendezvousMember]) -> _RendezvousOutcome:
    return _RendezvousOutcome(
        "a rank died before all had come",
        seen=f"{listed(dead)}; came so far: {listed(came)}",
        fix="Look at that process's own error.",
    )


def _disagreement(came: list[RendezvousMember]) -> _RendezvousOutcome:
    seen = differing((member.build, member) for member in came)
    if seen:
        return _RendezvousOutcome(DIFFERENT, seen=seen, fix=SAME_BUILD)
    says: dict[int, list[RendezvousMember]] = {}
    for member in came:
        says.setdefault(member.world_size, []).append(member)
    return _RendezvousOutcome(
        "the ranks disagree on the world size",
        seen="; ".join(f"{size} says {listed(group)}" for size, group in sorted(says.items())),
        fix="Start all ranks with the same WORLD_SIZE (or world_size=).",
    )


def _leave_all() -> None:
    """At the end of the process: leave what the program forgot to leave."""
    for each in list(_open):
        each.close()


at_process_end(_leave_all, order=1)
