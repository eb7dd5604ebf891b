"""Rendezvous: from what the user said to a store, a number, and who the others are.

`find_place` reads the `init_method` and the environment, the place opens the store, `meet` checks
the membership. What goes wrong in between becomes one `RendezvousError` here.

A meeting can go on without some of its ranks: `go_on_with` numbers the others anew.

A client may still reach the server of the ranks' previous meeting, which rank 0 is about to close.
It then loses the connection before the meeting is complete, and begins again with the next server.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from msgspec.structs import replace

from dure.errors import (
    RendezvousError,
    RendezvousTimeout,
    StoreError,
    StoreLost,
    StoreTimeout,
)
from dure.store.base import DEFAULT_TIMEOUT, Store
from dure.store.finding import find_place
from dure.store.identity import alive, myself
from dure.store.lifetime import at_process_end
from dure.store.membership import Meeting, Member, Verdict, contest, leave, meet, object_to
from dure.store.network import NetworkStore
from dure.store.places import Place, Spot
from dure.store.prefix import PrefixStore

__all__ = ["Member", "Rendezvous", "rendezvous", "rendezvous_at"]

_GOODBYE = timedelta(seconds=1)
_CONTEST_S = 0.3
"""How long a rank 0 that cannot serve looks for the one that does."""

_GUEST_S = 1.0
"""How long a rank that cannot take part looks for the others, to tell them why."""

_COMEBACK_S = 30.0
"""How long a server that was lost during a meeting is waited for."""


@dataclass(slots=True, kw_only=True, eq=False)
class Rendezvous:
    """A meeting that took place, from one rank's side.

    Attributes:
        store: Keys of this meeting alone, shared by its ranks; live until all have left.
        rank: This rank.
        world_size: How many there are.
        members: All of them, by rank.
    """

    store: Store
    rank: int
    world_size: int
    members: tuple[Member, ...]
    _base: Store = field(repr=False)
    _keys: Store = field(repr=False)
    _generation: int = field(repr=False)
    _owns: bool = field(repr=False)
    _holder: Member | None = field(repr=False)  # of the store, if it is a rank
    _number: int = field(repr=False)  # of this rank when it came
    _closed: bool = field(default=False, repr=False)

    @property
    def same_host(self) -> bool:
        """Whether all ranks can share memory (see `Identity.host_id`)."""
        return self.local_world_size == self.world_size

    @property
    def same_process(self) -> bool:
        """Whether all ranks are threads of this process."""
        return all(member.process == self.members[self.rank].process for member in self.members)

    @property
    def local_world_size(self) -> int:
        """How many ranks share this rank's host."""
        return len(self.host_ranks)

    @property
    def host_ranks(self) -> tuple[int, ...]:
        """The ranks that share this rank's host, itself included."""
        here = self.members[self.rank].host_id
        return tuple(member.rank for member in self.members if member.host_id == here)

    @property
    def reachable(self) -> bool:
        """Whether the store may still answer: the rank that holds it is not known to have ended."""
        return self._holder is None or alive(self._holder.process) is not False

    def ended(self, rank: int) -> bool:
        """Tell whether the process of `rank` is known to have ended."""
        return alive(self.members[rank].process) is False

    def require_store(self, op: str) -> None:
        """Raise `StoreLost` if the rank that serves the store is known to have ended."""
        if self.reachable:
            return
        assert self._holder is not None
        raise StoreLost(
            "the process that served the store has ended",
            op=op,
            rank=self.rank,
            peer=self._holder.rank,
            seen=f"{self._holder} served it, for no launcher does",
            fix="Start the job with `dure run`, whose store outlives every rank, or meet in a "
            "file, in etcd, or in a store of your own (init_method=, store=).",
        )

    def go_on_with(self, ranks: Sequence[int], name: str) -> None:
        """Go on with `ranks` alone, numbered from 0 in this order, on keys of their own.

        Collective:
            All of `ranks` call, with equal arguments.
        """
        mine = self.members[self.rank].token
        kept = [self.members[rank] for rank in ranks]
        self.members = tuple(
            replace(member, rank=rank, world_size=len(kept)) for rank, member in enumerate(kept)
        )
        self.rank = next(member.rank for member in self.members if member.token == mine)
        self.world_size = len(kept)
        if self._holder is not None:
            held_by = self._holder.token
            # A holder that is no member any more holds on as long as its process lives.
            found = [member for member in self.members if member.token == held_by]
            self._holder = found[0] if found else None
        self.store = PrefixStore(name, self.store)

    def forget(self) -> None:
        """Leave without a goodbye: the store is lost, or nobody will meet under these keys again.

        The store that was met in stays open.
        """
        self._closed = True
        _open.discard(self)
        _active.discard(self.members[self.rank].token)

    def close(self) -> None:
        """Leave; safe to call twice, and without effect in a forked child.

        A store that the caller gave stays open.
        """
        if self._closed or self.members[self.rank].pid != os.getpid():
            return
        self.forget()
        _leave(self._base, self._keys, self._number, self._generation, self._owns)


_open: set[Rendezvous] = set()
"""The meetings that ranks of this process are in: until they leave, or the process ends."""

_active: set[str] = set()
"""The tokens of these, and of those that this process is about to be in."""


def rendezvous(
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    store: Store | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    group_name: str = "",
) -> Rendezvous:
    """Meet the other ranks of the job.

    Args:
        init_method: `env://` (also if None), `tcp://HOST:PORT`, `file:///PATH` or
            `etcd://HOST:PORT/JOB`, all but the first optionally with `?rank=R&world_size=N`.
        rank: This rank; -1 if `init_method` or the environment says it.
        world_size: How many ranks there are; -1 likewise.
        store: A store to meet in, instead of `init_method`.
        timeout: How long to wait for all ranks; also the timeout of the store.
        group_name: Sets several meetings in one store apart.

    Raises:
        RendezvousError: See the module; the text says what to do.
        RendezvousTimeout: `came` and `missing` say who did and did not.

    Collective:
        All ranks call. A rank that does not is named in the others' `RendezvousTimeout`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if store is not None:
        if rank == -1 or world_size == -1:
            raise RendezvousError(
                "rank and world_size must be given with store=",
                fix="Pass rank=... and world_size=... to init_process_group.",
            )
        me = Member(rank, world_size, myself(), uuid.uuid4().hex)
        _check_number(me, store, f"store/{group_name}")
        return _join(store, None, me, f"store/{group_name}", deadline)
    return rendezvous_at(find_place(init_method, rank, world_size), timeout, group_name)


def rendezvous_at(
    spot: Spot, timeout: timedelta = DEFAULT_TIMEOUT, group_name: str = ""
) -> Rendezvous:
    """Meet the other ranks at a place that is known; otherwise as `rendezvous`."""
    deadline = time.monotonic() + timeout.total_seconds()
    me = Member(spot.rank, spot.world_size, myself(), uuid.uuid4().hex)
    name = f"{spot.place.name}/{group_name}"
    _check_number(me, spot.place, name)
    lost_at = None
    while True:
        opened = _open_place(spot.place, me, name, deadline)
        try:
            result = _join(opened, spot.place, me, name, deadline)
            opened.set_timeout(timeout)
            return result
        except StoreLost as error:
            lost_at = lost_at or time.monotonic()
            if time.monotonic() > min(deadline, lost_at + _COMEBACK_S):
                raise _translated(error, me) from None


def _join(store: Store, place: Place | None, me: Member, name: str, deadline: float) -> Rendezvous:
    """Meet in an open store; on failure close it, if it is ours, that is, was opened at `place`."""
    owns, held_by_rank_0 = place is not None, place is not None and place.held_by_rank_0
    keys = PrefixStore(f"dure/{name}", store)
    _active.add(me.token)
    try:
        meeting: Meeting = meet(keys, me, deadline, _active)
    except BaseException as error:
        _active.discard(me.token)
        if owns:
            _give_up(store)
        if isinstance(error, StoreError) and not (owns and isinstance(error, StoreLost)):
            raise _translated(error, me) from None
        raise
    result = Rendezvous(
        store=PrefixStore(f"{meeting.generation}/keys", keys),
        rank=me.rank,
        world_size=me.world_size,
        members=meeting.members,
        _base=store,
        _keys=keys,
        _generation=meeting.generation,
        _owns=owns,
        _holder=meeting.members[0] if held_by_rank_0 else None,
        _number=me.rank,
    )
    _open.add(result)
    return result


def _check_number(me: Member, where: Place | Store, name: str) -> None:
    """Refuse a rank or world size that cannot be, and tell those who wait."""
    if 0 <= me.rank < me.world_size:
        return
    what = f"rank {me.rank} cannot be in a job of {me.world_size}"
    if me.world_size < 1:
        what = f"a world size of {me.world_size} is not possible"
    verdict = Verdict(
        what,
        seen=f"{me.process} was started with RANK={me.rank} and WORLD_SIZE={me.world_size}",
        fix="Ranks go from 0 to WORLD_SIZE - 1.",
    )
    with contextlib.suppress(StoreError, RendezvousError):
        if isinstance(where, Store):
            object_to(PrefixStore(f"dure/{name}", where), me, verdict)
        else:
            _visit(where, me, name, lambda keys: object_to(keys, me, verdict), _GUEST_S)
    verdict.raise_for(me)


def _open_place(place: Place, me: Member, name: str, deadline: float) -> Store:
    """Open the store; a rank 0 that cannot serve looks whether there is a rank 0 already."""
    try:
        return place.open(me.rank, me.world_size, max(0.1, deadline - time.monotonic()))
    except StoreError as error:
        if me.rank == 0:
            _visit(place, me, name, lambda keys: contest(keys, me), _CONTEST_S)
        raise _translated(error, me) from None


def _visit(
    place: Place, me: Member, name: str, action: Callable[[Store], None], limit_s: float
) -> None:
    """Do something in the job's store without taking part; a store that fails is left alone."""
    with contextlib.suppress(StoreError):
        store = place.open(-1, me.world_size, limit_s)
        try:
            action(PrefixStore(f"dure/{name}", store))
        finally:
            _give_up(store)


def _translated(error: StoreError, me: Member) -> RendezvousError:
    """Turn what a store says into what it means for the meeting."""
    where: dict[str, object] = {"rank": me.rank, "world_size": me.world_size}
    where |= {"elapsed_s": error.elapsed_s, "seen": error.seen, "fix": error.fix}
    if isinstance(error, StoreTimeout):
        return RendezvousTimeout(error.what, came=(me.rank,), missing=(0,), **where)
    return RendezvousError(error.what, **where)  # pyright: ignore[reportArgumentType]


def _give_up(store: Store) -> None:
    """Close a store of ours after a meeting that failed."""
    if isinstance(store, NetworkStore):
        store.abandon()
    else:
        store.close()


def _leave(base: Store, keys: Store, rank: int, generation: int, owns: bool) -> None:
    """Say goodbye, as far as anybody is still listening."""
    if owns:
        base.set_timeout(_GOODBYE)
    with contextlib.suppress(StoreError):
        leave(keys, rank, generation)
    if owns:
        with contextlib.suppress(StoreError):
            base.close()


def _leave_all() -> None:
    """At the end of the process: leave what the program forgot to leave."""
    for meeting in list(_open):
        meeting.close()


at_process_end(_leave_all, order=1)
