"""Creation of groups: the steps that the default group and every other group share.

A group has a name, a key space in the store (a prefix made of the name), and one backend for each
kind of device. Any number of groups is made in one exchange:

1. each rank writes an entry for each group that it is a member of: its arguments, its line of the
   program, and the offers of its backends (backends/registry.py): one visit to the store;
2. it waits until all members of these groups have written, and reads: two visits;
3. members with different arguments all raise the same `Desync`, with the entries of all;
4. the backends of all groups are connected, and then completed, in the order given.

Ranks that wait for a member here check regularly whether its process still lives. The keys of a
group are removed when all its members have left it (`forget_keys`).
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

import msgspec

from dure import native
from dure.comm.backends import verify
from dure.comm.backends.base import Backend, BackendOptions
from dure.comm.backends.registry import Opening, check_pg_options, open_backend, parse_backend
from dure.comm.backends.staged import serving
from dure.comm.checks import duration
from dure.comm.group import GroupSpec, ProcessGroup
from dure.comm.group_lines import report_group
from dure.comm.world import World
from dure.errors import (
    Desync,
    DureError,
    PeerLost,
    RendezvousTimeout,
    StoreError,
    StoreTimeout,
    UsageError,
)
from dure.store.base import Store
from dure.store.builds import Build, own_build, require_one_build
from dure.store.identity import alive, myself
from dure.store.prefix import PrefixStore
from dure.store.rendezvous import Rendezvous, RendezvousMember
from dure.trace.ring import call_site

default_pg_timeout = timedelta(minutes=30)
"""How long an operation waits for its peers by default."""

_LOOK_S = 0.05

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
        3 visits to the store, and those of backends without an `Opening`.
    """
    members = () if world.rendezvous is None else world.rendezvous.members
    alone = world.rendezvous is not None and world.rendezvous.alone
    creations = [
        _GroupCreation(spec, my_global_rank, store, members, world.eager_bytes, alone)
        for spec in specs
    ]
    try:
        for creation in creations:
            creation.open()
        _exchange(store, creations)
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
            report_group(group, spec, members)
    except BaseException:
        for creation in creations:
            creation.withdraw()
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


class _GroupCreation:
    """One rank's part of a group that is being created."""

    def __init__(
        self,
        spec: GroupSpec,
        my_global_rank: int,
        store: Store,
        members: Sequence[RendezvousMember],
        eager_bytes: int | None,
        alone: bool,
    ) -> None:
        self.alone = alone  # the other ranks do not exist
        self.spec, self.rank = spec, spec.global_ranks.index(my_global_rank)
        self._store, self._members, self._eager_bytes = store, members, eager_bytes
        self.watched = WatchedStore(store, spec, members)
        self._openings: dict[str, Opening] = {}
        self._options: dict[str, BackendOptions] = {}
        self._built: dict[str, Backend] = {}
        self._group: ProcessGroup | None = None
        self.entries: list[_MemberEntry] = []

    @property
    def keys(self) -> list[str]:
        """The keys of its members' entries, by group rank."""
        return [f"group/{self.spec.name}/member/{r}" for r in range(len(self.spec.global_ranks))]

    @property
    def description(self) -> str:
        options = self.spec.pg_options
        verify = options.get("verify") if isinstance(options, Mapping) else None
        compares = "" if verify is None else f", verify={verify}"
        return f"ranks {list(self.spec.global_ranks)}, backend {self.spec.backend!r}{compares}"

    def open(self) -> None:
        names = dict.fromkeys(parse_backend(self.spec.backend).values())
        if self._members:  # a group of the plug-in has torch's options
            check_pg_options(names, self.spec.pg_options)
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
                size=len(self.spec.global_ranks),
                global_ranks=self.spec.global_ranks,
                timeout=self.spec.timeout,
                name=self.spec.name,
                hosts=tuple(self._members[r].host_id for r in self.spec.global_ranks)
                if self._members
                else (),
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
        return msgspec.msgpack.encode(mine)

    def check(self) -> None:
        """Compare the members' entries; all of them find the same difference."""
        if self.alone:
            return
        if not self._members:
            names = [f"rank {r} ({entry.process})" for r, entry in enumerate(self.entries)]
            builds = zip([entry.build for entry in self.entries], names, strict=True)
            require_one_build(builds, group=self.spec.name, rank=self.rank)
        if all(entry.description == self.description for entry in self.entries):
            return
        calls = {r: f"new_group({e.description}) at {e.site}" for r, e in enumerate(self.entries)}
        reasons = {r: e.without_engine for r, e in enumerate(self.entries) if e.without_engine}
        seen = [f"rank {r}: {text}" for r, text in calls.items()]
        seen += [f"rank {r} has no native engine ({reason})" for r, reason in reasons.items()]
        raise Desync(
            "the members do not agree on the group",
            group=self.spec.name,
            rank=self.rank,
            world_size=len(self.entries),
            calls=calls,
            seen="; ".join(seen),
            fix="All ranks must create the same groups, with equal arguments, in the same order.",
        )

    def connect(self) -> None:
        for name, opening in self._openings.items():
            opening.connect([entry.offers[name] for entry in self.entries])

    def build(self) -> dict[str, Backend]:
        """Build the backend of each kind of device."""
        for name, opening in self._openings.items():
            backend, options = opening.complete(), self._options[name]
            if not getattr(backend, "compares_calls", False) and verify.wanted(options):
                backend = verify.VerifyingBackend(backend, options)
            self._built[name] = backend
        chosen = parse_backend(self.spec.backend)
        return {d: serving(self._built[name], d, self.rank) for d, name in chosen.items()}

    def complete(self) -> ProcessGroup:
        store = PrefixStore(f"group/{self.spec.name}", self._store)
        self._group = ProcessGroup(self.spec, self.rank, self.build(), store, self._second)
        return self._group

    def _second(self, name: str) -> dict[str, Backend]:
        """Build the backends again, for a second channel; all members call."""
        spec = replace(self.spec, name=name)
        me = spec.global_ranks[self.rank]
        twin = _GroupCreation(spec, me, self._store, self._members, self._eager_bytes, self.alone)
        try:
            twin.open()
            _exchange(self._store, [twin])
            twin.check()
            twin.connect()
            return twin.build()
        except BaseException:
            twin.withdraw()
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


def _exchange(store: Store, creations: Sequence[_GroupCreation]) -> None:
    """Exchange the entries of the members of all groups.

    If that fails the entries are removed, so that the next attempt of this name does not find them.
    """
    creations = [c for c in creations if not c.alone]
    if not creations:
        return
    site, keys = call_site(), [key for c in creations for key in c.keys]
    mine = [c.keys[c.rank] for c in creations]
    store.multi_set(mine, [c.entry(site) for c in creations])
    try:
        _wait_for_members(store, creations, keys)
        values = iter(store.multi_get(keys))
    except BaseException:
        with suppress(StoreError):
            for key in mine:
                store.delete_key(key)
        raise
    for creation in creations:
        creation.entries = [
            msgspec.msgpack.decode(next(values), type=_MemberEntry) for _ in creation.keys
        ]


def _wait_for_members(
    store: Store, creations: Sequence[_GroupCreation], keys: Sequence[str]
) -> None:
    """Return when all `keys` exist; of several groups the longest creation limit counts."""
    limit = max(c.spec.creation_limit for c in creations)
    try:
        wait_watching(store, keys, limit, [c.watched for c in creations])
    except StoreTimeout:
        for creation in creations:
            _name_missing(store, creation, limit)
        raise


def _name_missing(store: Store, creation: _GroupCreation, limit: timedelta) -> None:
    """Raise if members of a group did not call."""
    missing = tuple(r for r, key in enumerate(creation.keys) if not store.check([key]))
    if not missing:
        return
    global_ranks = creation.spec.global_ranks
    raise RendezvousTimeout(
        "not all members called to create the group",
        group=creation.spec.name,
        rank=creation.rank,
        world_size=len(global_ranks),
        elapsed_s=limit.total_seconds(),
        came=tuple(r for r in range(len(global_ranks)) if r not in missing),
        missing=missing,
        seen=f"missing are global ranks {[global_ranks[r] for r in missing]}",
        fix="All ranks must create the same groups in the same order.",
    ) from None


class ChecksMembers(Protocol):
    """An object that checks whether the members of a group are alive."""

    def look(self) -> None:
        """Raise if one of them has ended."""
        ...


def wait_watching(
    store: Store, keys: Sequence[str], limit: timedelta, groups: Sequence[ChecksMembers]
) -> None:
    """Return when all `keys` exist; check the members of `groups` at growing intervals."""
    deadline = time.monotonic() + limit.total_seconds()
    look_s = _LOOK_S
    while True:
        left_s = deadline - time.monotonic()
        try:
            return store.wait(keys, timedelta(seconds=max(0.0, min(left_s, look_s))))
        except StoreTimeout:
            if left_s <= look_s:
                raise
        for group in groups:
            group.look()
        look_s = min(2 * look_s, 1.0)


class WatchedStore(PrefixStore):
    """The keys of a group; a wait for a member that has died raises `PeerLost`."""

    def __init__(self, store: Store, spec: GroupSpec, members: Sequence[RendezvousMember]) -> None:
        super().__init__(f"group/{spec.name}", store)
        self._spec = spec
        # A copy: backends keep this store, and a world that shrinks gets other numbers.
        self._members = [members[r] for r in spec.global_ranks] if members else []

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all `keys` exist."""
        limit = self.timeout if timeout is None else timeout
        wait_watching(self._store, self._full(keys), limit, [self])

    def check(self, keys: Sequence[str]) -> bool:
        """Return at once whether all `keys` exist."""
        here = super().check(keys)
        if not here:
            self.look()
        return here

    def look(self) -> None:
        """Raise if a member's process has ended."""
        for peer, member in enumerate(self._members):
            if alive(member.process) is False:
                raise PeerLost(
                    f"the process of rank {peer} ended before the group was made",
                    group=self._spec.name,
                    world_size=len(self._spec.global_ranks),
                    peer=peer,
                    pid=member.pid,
                    host=member.host,
                    seen=f"global rank {self._spec.global_ranks[peer]}, pid {member.pid}",
                    fix="Make the group of ranks that live: dure.shrink() finds them.",
                )


def forget_keys(group: ProcessGroup, rendezvous: Rendezvous) -> None:
    """Note that this rank has left; the last one removes the group's keys from the store.

    The keys stay if a member ends without leaving. A lost store keeps nothing.
    """
    with suppress(StoreError):
        # `add` returns the sum, so exactly one rank is the last, and none reads the keys later.
        if rendezvous.reachable and group.store.add("left", 1) == group.size():
            for key in group.store.list_keys():
                group.store.delete_key(key)


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
