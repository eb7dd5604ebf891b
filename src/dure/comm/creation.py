"""Creation of groups: the steps that the default group and every other group share.

A group has a name, a key space in the store (a prefix made of the name), and one backend for each
kind of device. Any number of groups is made in one exchange:

1. each rank counts itself in each group that it is a member of (store/gathering.py): one visit to
   the store each;
2. it writes an entry for each of them: its arguments, its line of the program, and the offers of
   its backends (backends/registry.py): one visit. The last member of a group compares the entries
   and publishes the offers; if the entries differ, all of them;
3. it waits until that is published for all of these groups, and reads it: two visits;
4. members with different arguments all raise the same `Desync`, with the entries of all;
5. the backends of all groups are connected, and then completed, in the order given.

Each group is published as soon as all its members have called. Of the ranks that wait for a member
the first two of each host check regularly whether the processes of that host still live, and report
one that has ended to all. A rank that fails reports this to all its groups, so that no member waits
for it: in the verdict, or, if the group is published and this rank has not begun to complete it, in
a key (`failed`) that members look for while they connect. The keys of a group are removed when all
its members have left it (`forget_keys`).
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import msgspec

from dure import native
from dure.comm.backends import verify
from dure.comm.backends.base import Backend, BackendOptions
from dure.comm.backends.registry import Opening, check_pg_options, open_backend, parse_backend
from dure.comm.backends.staged import serving
from dure.comm.checks import duration
from dure.comm.group import GroupSpec, ProcessGroup
from dure.comm.group_lines import report_group
from dure.comm.rank_text import listed_ranks
from dure.comm.world import World
from dure.errors import (
    Desync,
    DureError,
    PeerLost,
    RendezvousError,
    RendezvousTimeout,
    StoreError,
    StoreTimeout,
    UsageError,
)
from dure.store.base import Store
from dure.store.builds import Build, own_build, require_one_build
from dure.store.gathering import Gathering, Verdict, reason_of, wait_for_verdicts
from dure.store.identity import Identity, alive, myself
from dure.store.members import MemberTable
from dure.store.prefix import PrefixStore
from dure.store.rendezvous import Rendezvous
from dure.trace.ring import call_site

default_pg_timeout = timedelta(minutes=30)
"""How long an operation waits for its peers by default."""

_LOOK_S = 0.05
_LONGEST_LOOK_S = 1.0
_WATCHERS, _SELDOM_LOOK_S = 2, 5.0
"""How many ranks of a host look often at its processes while a group is created; how often the
others look, as these may be dead or late themselves."""

RENDEZVOUS_LIMIT = timedelta(minutes=5)
"""How long group creation waits for members by default."""


def as_timeout(timeout: timedelta | float | None, default: timedelta) -> timedelta:
    """Return `timeout` as a timedelta; raise unless it is a positive time."""
    if timeout is None:
        return default
    timeout = duration(timeout)
    if timeout <= timedelta(0):
        raise UsageError("the timeout must be positive", seen=f"got {timeout}")
    return timeout


def create_groups(
    world: World, store: Store, my_global_rank: int, specs: Sequence[GroupSpec]
) -> list[ProcessGroup]:
    """Build this rank's part of groups that it is a member of, and add them to the world.

    Args:
        world: Of this rank.
        store: Of the job.
        my_global_rank: This rank.
        specs: Of the groups.

    Collective:
        All members of each group call, in one call or several, in the same order of groups.

    Cost:
        3 visits to the store, one more per group, and those of backends without an `Opening`.
    """
    rendezvous = world.rendezvous
    members = None if rendezvous is None else rendezvous.members
    creations = [
        _GroupCreation(spec, my_global_rank, store, members, world.eager_bytes, rendezvous)
        for spec in specs
    ]
    try:
        for creation in creations:
            creation.open()
        _exchange(creations)
        for spec in specs:
            if spec.local:
                made = world.created_locally.get(spec.global_ranks, 0)
                world.created_locally[spec.global_ranks] = made + 1
        for creation in creations:
            creation.check()
        for creation in creations:
            creation.connect()
        groups = [creation.complete() for creation in creations]
        for group, spec in zip(groups, specs, strict=True):
            report_group(group, spec, members or ())
    except BaseException as error:
        _withdraw(creations, error)
        raise
    with world.lock:
        world.groups.update((group.group_name, group) for group in groups)
    return groups


class _MemberEntry(msgspec.Struct, array_like=True, frozen=True):
    """The value that a member writes into the store: its arguments, and its backends' offers.

    Ranks of the plug-in, which have no rendezvous of Dure, also write their build and process.
    `without_engine` is why the native engine cannot be used, or "". Every version reads this, so
    fields are only appended.
    """

    description: str
    site: str
    offers: dict[str, bytes]
    build: Build = Build()
    process: str = ""
    without_engine: str = ""


class _GroupSummary(msgspec.Struct, array_like=True, frozen=True):
    """What the members of a group read of each other.

    Attributes:
        offers: By backend and rank, without those that are empty. Of members that agree.
        entries: Of all members that do not agree.
    """

    offers: dict[str, dict[int, bytes]] = {}
    entries: list[_MemberEntry] = []


_pack = msgspec.msgpack.encode
_read_entry = msgspec.msgpack.Decoder(_MemberEntry).decode
_read_failure = msgspec.msgpack.Decoder(tuple[int, str]).decode
_read_summary = msgspec.msgpack.Decoder(_GroupSummary).decode


def _summarize(packed: Sequence[bytes]) -> bytes:
    """Compare the entries of all members; return what they need to read."""
    entries = [_read_entry(each) for each in packed]
    if len({(entry.description, entry.build) for entry in entries}) > 1:
        return _pack(_GroupSummary(entries=entries))
    offers: dict[str, dict[int, bytes]] = {name: {} for name in entries[0].offers}
    for rank, entry in enumerate(entries):
        for name, offer in entry.offers.items():
            if offer:
                offers[name][rank] = offer
    return _pack(_GroupSummary(offers))


class _GroupCreation:
    """One rank's part of a group that is being created."""

    def __init__(
        self,
        spec: GroupSpec,
        my_global_rank: int,
        store: Store,
        members: MemberTable | None,
        eager_bytes: int | None,
        rendezvous: Rendezvous | None,
        may_repeat: bool = False,
    ) -> None:
        self._rendezvous = rendezvous  # its members may be renumbered since
        self.alone = rendezvous is not None and rendezvous.alone  # the other ranks do not exist
        self._holder = None if rendezvous is None else rendezvous.holder
        self.spec, self.rank = spec, spec.global_ranks.index(my_global_rank)
        self._store, self._members, self._eager_bytes = store, members, eager_bytes
        self.watched = WatchedStore(store, spec, members, self.rank)
        self._openings: dict[str, Opening] = {}
        self._options: dict[str, BackendOptions] = {}
        self._built: dict[str, Backend] = {}
        self._group: ProcessGroup | None = None
        self._offers: dict[str, dict[int, bytes]] = {}
        self._entries: list[_MemberEntry] = []
        self._look_s, self._is_completing = 0.0, False
        size = len(spec.global_ranks)
        self.gathering = Gathering(
            store,
            f"group/{spec.name}",
            self.rank,
            size,
            _summarize,
            once=members is not None and not spec.local and not may_repeat,
            group=spec.name,
        )

    @property
    def description(self) -> str:
        options = self.spec.pg_options
        verify = options.get("verify") if isinstance(options, Mapping) else None
        compares = "" if verify is None else f", verify={verify}"
        ranks = listed_ranks(self.spec.global_ranks)
        return f"ranks {ranks}, backend {self.spec.backend!r}{compares}"

    def open(self) -> None:
        names = dict.fromkeys(parse_backend(self.spec.backend).values())
        if self._members:  # a group of the plug-in has torch's options
            check_pg_options(names, self.spec.pg_options)
        ranks, members = self.spec.global_ranks, self._members
        for name in names:
            if self.alone and name != "fake":
                raise UsageError(
                    f"the backend {name!r} needs the other ranks, which do not exist",
                    group=self.spec.name,
                    rank=self.rank,
                    seen="the default group uses the backend 'fake'",
                    fix="Make groups of a dry run without backend=, or with backend='fake'.",
                )
            options = self._options[name] = BackendOptions(
                store=PrefixStore(name, self.watched),
                rank=self.rank,
                size=len(ranks),
                global_ranks=ranks,
                timeout=self.spec.timeout,
                name=self.spec.name,
                hosts=() if members is None else members.host_ids(ranks),
                device_id=self.spec.device_id,
                eager_bytes=self._eager_bytes,
                pg_options=self.spec.pg_options,
            )
            self._openings[name] = open_backend(name, options)

    def entry(self, site: str) -> bytes:
        offers = {name: opening.offer for name, opening in self._openings.items()}
        build, process = (Build(), "") if self._members else (own_build(), str(myself()))
        reason = native.available()[1]
        mine = _MemberEntry(self.description, site, offers, build, process, reason)
        return _pack(mine)

    def watch(self) -> float:
        """Look whether the members of this host live; return the seconds until the next look.

        Raises:
            PeerLost: One of them has ended.
            Desync: They do not agree.
        """
        if self.gathering.summary:
            self.check()  # if its members differ, this rank does not wait for other groups
        if not self.watched.has_others:
            return math.inf
        if self._look_s:
            self.watched.look()
        if self.watched.watches:
            self._look_s = min(2 * self._look_s, _LONGEST_LOOK_S) or _LOOK_S
        else:
            self._look_s = _SELDOM_LOOK_S
        return self._look_s

    def give_up(self, error: BaseException, lost: int | None) -> None:
        """Report to the other members that this rank has failed.

        Args:
            error: Why.
            lost: The global rank of the process that has ended, if that is why.
        """
        if self.alone:
            return
        if self.gathering.summary:
            if not self._is_completing:  # the backend reports its own failures
                self.watched.report_failure(reason_of(error))
        elif lost in self.spec.global_ranks:
            self.gathering.fail(Verdict(lost=self.spec.global_ranks.index(lost)))
        else:
            self.gathering.give_up(error)

    def error(self, elapsed_s: float) -> DureError:
        """Return the error for a gathering that has failed."""
        verdict, global_ranks = self.gathering.verdict, self.spec.global_ranks
        assert verdict is not None
        if verdict.lost >= 0:
            return self.watched.ended(verdict.lost)
        where: dict[str, Any] = {
            "group": self.spec.name,
            "rank": self.rank,
            "world_size": len(global_ranks),
        }
        if verdict.failed >= 0:
            return self.watched.failed(verdict.failed, verdict.why)
        late = "; this rank came when the others had given up" * (self.rank in verdict.missing)
        return RendezvousTimeout(
            "not all members called to create the group",
            elapsed_s=elapsed_s,
            came=tuple(sorted(set(range(len(global_ranks))).difference(verdict.missing))),
            missing=verdict.missing,
            seen=f"missing are global ranks {[global_ranks[r] for r in verdict.missing]}{late}",
            fix="All ranks must create the same groups in the same order.",
            **where,
        )

    def check(self) -> None:
        """Read what was published; if members differ, all of them find the same difference."""
        if self.alone:
            return
        summary = _read_summary(self.gathering.summary)
        self.watched.use_attempt(self.gathering.number)
        self._offers, entries = summary.offers, summary.entries
        if not entries:
            return
        if not self._members:
            names = [f"rank {r} ({entry.process})" for r, entry in enumerate(entries)]
            builds = zip([entry.build for entry in entries], names, strict=True)
            require_one_build(builds, group=self.spec.name, rank=self.rank)
        calls = {r: f"new_group({e.description}) at {e.site}" for r, e in enumerate(entries)}
        reasons = {r: e.without_engine for r, e in enumerate(entries) if e.without_engine}
        seen = [f"rank {r}: {text}" for r, text in calls.items()]
        seen += [f"rank {r} has no native engine ({reason})" for r, reason in reasons.items()]
        raise Desync(
            "the members do not agree on the group",
            group=self.spec.name,
            rank=self.rank,
            world_size=len(entries),
            calls=calls,
            seen="; ".join(seen),
            fix="All ranks must create the same groups, with equal arguments, in the same order.",
        )

    def connect(self) -> None:
        ranks = () if self.alone else range(len(self.spec.global_ranks))
        for name, opening in self._openings.items():
            offers = self._offers.get(name, {})
            opening.connect([offers.get(rank, b"") for rank in ranks])

    def build(self) -> dict[str, Backend]:
        """Build the backend of each kind of device."""
        self._is_completing = True
        for name, opening in self._openings.items():
            backend, options = opening.complete(), self._options[name]
            if not getattr(backend, "compares_calls", False) and verify.wanted(options):
                backend = verify.VerifyingBackend(backend, options)
            self._built[name] = backend
        deaths = _MemberDeaths(self.watched, list(self._built.values()), self._holder)
        for backend in self._built.values():
            watch = getattr(backend, "watch", None)
            if watch is not None:
                watch(deaths)
        chosen = parse_backend(self.spec.backend)
        return {d: serving(self._built[name], d, self.rank) for d, name in chosen.items()}

    def complete(self) -> ProcessGroup:
        store = PrefixStore(f"group/{self.spec.name}/{self.gathering.number}", self._store)
        self._group = ProcessGroup(self.spec, self.rank, self.build(), store, self._second)
        self.watched.is_made = True
        return self._group

    def _second(self, name: str) -> dict[str, Backend]:
        """Build the backends again, for a second channel; all members call."""
        spec = replace(self.spec, name=name)
        me = spec.global_ranks[self.rank]
        given = (self._store, self._members, self._eager_bytes, self._rendezvous)
        # The name of a channel is the same at each attempt.
        twin = _GroupCreation(spec, me, *given, may_repeat=True)
        try:
            twin.open()
            _exchange([twin])
            twin.check()
            twin.connect()
            built = twin.build()
            twin.watched.is_made = True
            return built
        except BaseException as error:
            _withdraw([twin], error)
            raise

    def withdraw(self) -> None:
        """Close the parts that were made."""
        if self._group is not None:
            self._group.close(True)
        for part in self._built.values():
            with suppress(DureError):
                part.close(True)
        for opening in self._openings.values():
            with suppress(DureError):
                opening.withdraw()


def _withdraw(creations: Sequence[_GroupCreation], error: BaseException) -> None:
    """Report to members that wait for this rank that it has failed; close what was made."""
    lost = None
    if isinstance(error, PeerLost) and error.peer is not None:
        of_group = {c.spec.name: c.spec.global_ranks for c in creations}
        if error.group in of_group:
            lost = of_group[error.group][error.peer]
    try:
        for creation in creations:
            creation.give_up(error, lost)
    finally:
        for creation in creations:
            creation.withdraw()


def _exchange(creations: Sequence[_GroupCreation]) -> None:
    """Exchange the entries of the members of all groups; of these the longest limit counts."""
    creations = [c for c in creations if not c.alone]
    if not creations:
        return
    site, limit = call_site(), max(c.spec.creation_limit for c in creations)
    for creation in creations:
        creation.gathering.entry = creation.entry(site)
    gatherings, began = [c.gathering for c in creations], time.monotonic()
    failed = wait_for_verdicts(gatherings, limit, lambda: min(c.watch() for c in creations))
    if failed is not None:
        raise creations[gatherings.index(failed)].error(time.monotonic() - began)


class ChecksMembers(Protocol):
    """An object that checks whether the members of a group are alive."""

    def look(self) -> None:
        """Raise if one of them has ended."""
        ...


def wait_watching(
    store: Store,
    keys: Sequence[str],
    limit: timedelta,
    groups: Sequence[ChecksMembers],
    longest_s: float = _LONGEST_LOOK_S,
) -> None:
    """Return when all `keys` exist; check the members of `groups` at growing intervals.

    Args:
        store: To wait in.
        keys: To wait for.
        limit: How long to wait.
        groups: To check.
        longest_s: How long an interval may become.

    Raises:
        StoreTimeout: At the limit.
    """
    deadline = time.monotonic() + limit.total_seconds()
    look_s = _LOOK_S
    while True:
        left_s = deadline - time.monotonic()
        try:
            return store.wait(keys, timedelta(seconds=min(left_s, look_s)))
        except StoreTimeout:
            if left_s <= look_s:
                raise
        for group in groups:
            group.look()
        look_s = min(2 * look_s, longest_s)


class WatchedStore(PrefixStore):
    """The keys of a group; a wait for a member that has died raises `PeerLost`."""

    def __init__(
        self, store: Store, spec: GroupSpec, members: MemberTable | None, rank: int
    ) -> None:
        super().__init__(f"group/{spec.name}/0", store)
        self._spec, self._rank, self._members = spec, rank, members
        self._is_published = self.is_made = False

    def use_attempt(self, number: int) -> None:
        """Use the keys of the attempt in which all came: those of others may have been left."""
        self._prefix = f"group/{self._spec.name}/{number}/"
        self._is_published = True

    @cached_property
    def _processes(self) -> dict[Identity, int]:
        """The processes of this rank's host, each with the first member that it is."""
        if self._members is None:
            return {}
        return self._members.select(self._spec.global_ranks).processes_on_host_of(self._rank)

    @property
    def is_on_one_host(self) -> bool:
        """Whether all members are on this host."""
        return len(self._processes) == len(self._spec.global_ranks)

    def rank_of(self, process: Identity) -> int | None:
        """Return the other member that a process is, on any host; None if there is none."""
        if self._members is None:
            return None
        found = (self._members.process(each) == process for each in self._spec.global_ranks)
        rank = next((rank for rank, is_it in enumerate(found) if is_it), None)
        return None if rank == self._rank else rank

    @property
    def has_others(self) -> bool:
        """Whether there are other members on this host."""
        return len(self._processes) > 1

    @cached_property
    def watches(self) -> bool:
        """Whether this rank looks often: it is one of the first of its host, and not alone."""
        return self.has_others and self._rank in list(self._processes.values())[:_WATCHERS]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all `keys` exist."""
        limit = self.timeout if timeout is None else timeout
        longest_s = _LONGEST_LOOK_S if self.watches else _SELDOM_LOOK_S
        wait_watching(self._store, self._full(keys), limit, [self], longest_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Return at once whether all `keys` exist."""
        here = super().check(keys)
        if not here:
            try:
                self.look()
            except RendezvousError:  # the backend may have set the keys just before, as the reason
                if super().check(keys):
                    return True
                raise
        return here

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of a member on this host has ended."""
        ours = (process for process, peer in self._processes.items() if peer == rank)
        return any(alive(process) is False for process in ours)

    def look(self) -> None:
        """Raise if a member's process on this host has ended, or a member has failed."""
        for process, peer in self._processes.items():
            if alive(process) is False:
                raise self.ended(peer)
        if self._is_published and self._store.check([self._failed_key]):
            raise self.failed(*_read_failure(self._store.get(self._failed_key)))

    @property
    def _failed_key(self) -> str:
        return f"{self._prefix}failed"

    def report_failure(self, why: str) -> None:
        """Let other members know that this one has failed before it began to connect."""
        with suppress(StoreError):
            self._store.compare_set(self._failed_key, "", _pack((self._rank, why)))

    def failed(self, peer: int, why: str) -> RendezvousError:
        """Return the error for a member that has failed."""
        return RendezvousError(
            f"rank {peer} failed while the group was made",
            group=self._spec.name,
            rank=self._rank,
            world_size=len(self._spec.global_ranks),
            peer=peer,
            seen=f"global rank {self._spec.global_ranks[peer]}: {why}",
            fix="Look at that rank's own error.",
        )

    def ended(self, peer: int) -> PeerLost:
        """Return the error for a member whose process has ended."""
        global_rank = self._spec.global_ranks[peer]
        member = None if self._members is None else self._members[global_rank]
        when = "" if self.is_made else " before the group was made"
        pid = "" if member is None else f", pid {member.pid}"
        return PeerLost(
            f"the process of rank {peer} ended{when}",
            group=self._spec.name,
            world_size=len(self._spec.global_ranks),
            peer=peer,
            pid=None if member is None else member.pid,
            host=None if member is None else member.host,
            seen=f"global rank {global_rank}{pid}",
            fix="Make the group of ranks that live: dure.shrink() finds them.",
        )


class _MemberDeaths:
    """How the members of a group know of deaths: by a backend that watches them, or the kernel.

    See `engine.watchdog.Deaths`.
    """

    def __init__(
        self, store: WatchedStore, backends: Sequence[Backend], holder: Identity | None
    ) -> None:
        self._store = store
        self._asked = [lost for b in backends if (lost := getattr(b, "lost", None)) is not None]
        # A backend within a host knows itself who has left.
        knows = self._asked and store.is_on_one_host
        self.keeper = None if knows or holder is None else store.rank_of(holder)

    def has_died(self, rank: int) -> bool:
        if self._asked:
            return any(lost(rank) for lost in self._asked)
        return self._store.has_ended(rank)

    def error(self, rank: int) -> PeerLost:
        return self._store.ended(rank)


def forget_keys(group: ProcessGroup, rendezvous: Rendezvous) -> None:
    """Note that this rank has left; the last one removes the group's keys from the store.

    The keys stay if a member ends without leaving. A lost store keeps nothing.

    Cost:
        One visit to the store; for the last rank, two more, and the names of all keys.
    """
    with suppress(StoreError):
        # `add` returns the sum, so exactly one rank is the last, and none reads the keys later.
        if rendezvous.reachable and group.store.add("left", 1) == group.size():
            group.store.delete_keys(group.store.list_keys())


def check_ranks(ranks: Sequence[int], world_size: int, op: str) -> tuple[int, ...]:
    """Return `ranks` as ints; raise unless they differ and are ranks of the world."""
    try:
        plain = tuple(operator.index(r) for r in ranks)
    except TypeError:
        raise UsageError("ranks must be a list of integers", op=op, seen=f"got {ranks!r}") from None
    for r in plain:
        if not 0 <= r < world_size:
            raise UsageError(
                f"Rank {r} is out of range",
                op=op,
                seen=f"the world has ranks 0 to {world_size - 1}",
            )
    if len(set(plain)) != len(plain):
        raise UsageError("a rank is named twice", op=op, seen=f"ranks {list(plain)}")
    if not plain:
        raise UsageError("a group needs at least one rank", op=op, seen="ranks=[]")
    return plain
