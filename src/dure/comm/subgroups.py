"""Groups of some of the world's ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import msgspec
import torch

from dure.comm.call import members_code
from dure.comm.creation import (
    GroupSpec,
    as_timeout,
    check_ranks,
    create_groups,
    member_keys,
)
from dure.comm.group import ProcessGroup
from dure.comm.world import GroupMember, World, current_world, resolve
from dure.errors import (
    CommError,
    CommTimeout,
    Desync,
    RendezvousTimeout,
    StoreError,
    UsageError,
)
from dure.trace.ring import call_site


class HasRankLists(Protocol):
    """What a mesh is to `new_group`."""

    def rank_lists(self) -> list[list[int]]:
        """Return the global ranks of this mesh, and of all others that are cut alike."""
        ...


Group = ProcessGroup
"""A `ProcessGroup`, or `GroupMember.NON_GROUP_MEMBER` on ranks outside it."""


def _next_name(world: World, ranks: tuple[int, ...], local: bool) -> str:
    """Name a new group, alike on all its members.

    Where all ranks of the world call, one counter does. With local synchronisation only the members
    call, so the counter is that of this very set of ranks.
    """
    if not local:
        world.num_created += 1
        return f"{world.num_created}"
    number = world.created_locally.get(ranks, 0) + 1
    world.created_locally[ranks] = number
    return _local_name(ranks, number)


def _local_name(ranks: tuple[int, ...], number: int) -> str:
    return f"{'-'.join(map(str, ranks))}/{number}"


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
    mesh: HasRankLists | None = None,
) -> Group:
    """Create a group of some of the world's ranks.

    Args:
        ranks: Global ranks of the members; None for all.
        timeout: How long its operations wait, and how long its creation waits for the other ranks.
            Where None, the world's: what `init_process_group` was given; without that operations
            wait 30 minutes, and creation 5.
        backend: Its backend; that of the world where None.
        pg_options: Options of the backend: ``{"verify": True}`` of any, ProcessGroupNCCL.Options
            of nccl, anything of a registered one. What no backend would use is refused.
        use_local_synchronization: Only the members call, in place of all ranks of the world; one
            such group at a time.
        group_desc: What the group is for, shown in messages.
        device_id: The device that this rank is bound to.
        sort_ranks: Number the members by their global ranks; else in the order given.
        mesh: In place of `ranks`: a group of this rank's (sub-)mesh, in the mesh's order, apart
            from the groups that the mesh has. All sub-meshes get theirs in one call.

    Returns:
        The group, or `GroupMember.NON_GROUP_MEMBER` on a rank that is not in it.

    Raises:
        UsageError: A rank is out of range or named twice.
        Desync: A rank called something else, or the members gave different arguments; with
            everybody's lines. The former where the world's backend compares calls.
        RendezvousTimeout: A rank did not call; members are named.
        PeerLost: A member's process has ended.
        StoreLost: The store has died with rank 0, and cannot be held by another rank.

    Collective:
        All ranks of the world call, in the same order, members or not (see
        `use_local_synchronization`).

    Cost:
        A barrier of the world, and some round trips to the store: milliseconds.
    """
    kind = Kind(timeout, backend, pg_options, group_desc, device_id)
    if mesh is not None:
        if ranks is not None or use_local_synchronization:
            raise UsageError(
                "mesh stands in place of ranks, and all ranks call",
                op="new_group",
                seen=f"ranks={ranks}, use_local_synchronization={use_local_synchronization}",
            )
        lists = mesh.rank_lists()
        groups = _new_groups(lists, [kind] * len(lists), False, False, "new_group")
        own = [g for g in groups if g is not GroupMember.NON_GROUP_MEMBER]
        return own[0] if own else GroupMember.NON_GROUP_MEMBER
    return _new_groups([ranks], [kind], use_local_synchronization, sort_ranks, "new_group")[0]


@dataclass(frozen=True, slots=True)
class Kind:
    """What groups are to be besides their ranks; see `new_group`.

    `creation_timeout` is how long creation waits for members; `timeout` where None.
    """

    timeout: timedelta | None = None
    backend: str | None = None
    pg_options: object = None
    group_desc: str | None = None
    device_id: torch.device | None = None
    creation_timeout: timedelta | None = None


def new_groups(
    rank_lists: Sequence[Sequence[int]], kinds: Sequence[Kind] | None = None
) -> list[Group]:
    """Create several groups at once, which may overlap: all axes of a mesh, say.

    Args:
        rank_lists: The global ranks of each group, in the order of their ranks in it.
        kinds: What each group is to be.

    Returns:
        The groups, `GroupMember.NON_GROUP_MEMBER` for those that this rank is not in.

    Raises, Collective:
        As `new_group`.

    Cost:
        That of one group (comm/creation.py).
    """
    kinds = [Kind()] * len(rank_lists) if kinds is None else kinds
    return _new_groups(rank_lists, kinds, False, False, "new_groups")


def _new_groups(
    rank_lists: Sequence[Sequence[int] | None],
    kinds: Sequence[Kind],
    local: bool,
    sort: bool,
    op: str,
) -> list[Group]:
    world = current_world()
    default = world.need_default()
    limits = [as_timeout(kind.timeout, default.timeout) for kind in kinds]
    creation = [
        kind.creation_timeout or as_timeout(kind.timeout, default.creation_timeout)
        for kind in kinds
    ]
    lists = [
        check_ranks(range(default.size()) if ranks is None else ranks, default.size(), op)
        for ranks in rank_lists
    ]
    lists = [tuple(sorted(ranks)) if sort else ranks for ranks in lists]
    specs = [
        GroupSpec(
            name=_next_name(world, ranks, local),
            global_ranks=ranks,
            backend=(kind.backend or default.backend_config).lower(),
            timeout=limit,
            desc=kind.group_desc or "",
            pg_options=kind.pg_options,
            device_id=kind.device_id,
            creation_timeout=soon,
            why="asked for" if kind.backend else "as the default group",
        )
        for ranks, kind, limit, soon in zip(lists, kinds, limits, creation, strict=True)
    ]
    rendezvous = world.rendezvous
    assert rendezvous is not None
    rendezvous.require_store(op)
    if not local:
        _announce(default, lists, max(creation, default=default.creation_timeout))
    mine = [spec for spec in specs if default.rank() in spec.global_ranks]
    made: list[ProcessGroup] = []
    watcher = _LocalMembers(world, default, mine[0]) if local and mine else None
    if mine:
        try:
            made = create_groups(world, rendezvous.store, default.rank(), mine, watcher)
        finally:
            if watcher is not None:
                watcher.end()
    by_name = {group.group_name: group for group in made}
    return [by_name.get(spec.name, GroupMember.NON_GROUP_MEMBER) for spec in specs]


def _announce(default: ProcessGroup, rank_lists: Sequence[Sequence[int]], limit: timedelta) -> None:
    """Let all ranks of the world compare which groups they make, before any is waited for.

    A world that is broken already cannot compare: then members find out in the store, as they do
    where only members call. That is how survivors of a death make groups of their own.
    """
    began = time.monotonic()
    try:
        default.announce_groups(members_code(rank_lists), limit)
    except Desync as error:
        if error.calls.get(default.rank(), "").startswith("new_group"):
            raise
    except CommTimeout as error:
        waited_s = time.monotonic() - began
        if waited_s < limit.total_seconds() / 2:
            return  # the world's time was up before
        raise RendezvousTimeout(
            "not all ranks called to make a group",
            op="new_group",
            group=default.group_name,
            rank=default.rank(),
            world_size=default.size(),
            elapsed_s=limit.total_seconds(),
            came=tuple(r for r in range(default.size()) if r not in error.missing),
            missing=error.missing,
            fix="All ranks of the world call new_group, members or not; only members do with "
            "use_local_synchronization=True.",
        ) from None
    except CommError:
        pass


class _Making(msgspec.Struct, frozen=True):
    """What a rank says of a group that it makes with its members alone."""

    ranks: tuple[int, ...]
    number: int
    site: str

    @property
    def name(self) -> str:
        return _local_name(self.ranks, self.number)

    def text(self) -> str:
        return f"new_group(ranks {list(self.ranks)}) at {self.site}"


class _LocalMembers:
    """Finds, through the store, members of a group that make another one in its place.

    Where only members call, the groups of ranks that name different members have nothing in common
    but those ranks. Each says what it makes. Two ranks that make different groups, which both are
    in and neither has come to before, wait for each other for ever: who finds that tells the
    members of both groups.
    """

    def __init__(self, world: World, default: ProcessGroup, spec: GroupSpec) -> None:
        assert world.rendezvous is not None
        self._world, self._default, self._store = world, default, default.store
        self._births = world.rendezvous.store
        number = world.created_locally[spec.global_ranks]
        self._mine = _Making(spec.global_ranks, number, call_site())
        said = msgspec.msgpack.encode(self._mine)
        self._store.set(f"making/{default.rank()}", said)

    def look(self) -> None:
        """Raise `Desync` if a member waits for this rank elsewhere."""
        mine, me = self._mine, self._default.rank()
        unmade = f"unmade/{mine.name}"
        if self._store.check([unmade]):
            self._break(msgspec.msgpack.decode(self._store.get(unmade), type=dict[int, _Making]))
        for rank in mine.ranks:
            if rank == me or not self._store.check([f"making/{rank}"]):
                continue
            theirs = msgspec.msgpack.decode(self._store.get(f"making/{rank}"), type=_Making)
            if theirs.ranks != mine.ranks and me in theirs.ranks and self._is_in_vain(rank, theirs):
                both = {me: mine, rank: theirs}
                said = msgspec.msgpack.encode(both)
                for making in both.values():
                    self._store.set(f"unmade/{making.name}", said)
                self._break(both)

    def _is_in_vain(self, rank: int, theirs: _Making) -> bool:
        """Tell whether `rank` waits for us there and we wait for it here."""
        came = self._world.created_locally.get(theirs.ranks, 0) >= theirs.number
        here = member_keys(self._mine.name, len(self._mine.ranks))[self._mine.ranks.index(rank)]
        return not came and not self._births.check([here])

    def _break(self, both: dict[int, _Making]) -> None:
        """Raise what two ranks make; both groups count as made, on all who are in them."""
        counts, me = self._world.created_locally, self._default.rank()
        for making in both.values():
            if me in making.ranks:
                counts[making.ranks] = max(counts.get(making.ranks, 0), making.number)
        calls = {rank: both[rank].text() for rank in sorted(both)}
        raise Desync(
            "the members do not agree on the group",
            op="new_group",
            group=self._mine.name,
            rank=me,
            world_size=self._default.size(),
            calls=calls,
            seen="; ".join(f"rank {r} says {text}" for r, text in calls.items()),
            fix="All members must name the same ranks, and make groups in the same order.",
        )

    def end(self) -> None:
        """Say that this rank makes the group no more."""
        with suppress(StoreError):
            self._store.delete_key(f"making/{self._default.rank()}")


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[Group, list[Group]]:
    """Create disjoint groups from lists of global ranks.

    Args:
        ranks_per_subgroup_list: The members of each group; no rank may be in two.
        timeout, backend, pg_options, group_desc: As in `new_group`.

    Returns:
        This rank's own group (NON_GROUP_MEMBER if it is in none), and the list of all.

    Raises:
        UsageError: A rank is out of range, or in two groups.
    """
    op = "new_subgroups_by_enumeration"
    world_size = current_world().need_default().size()
    if not ranks_per_subgroup_list:
        raise UsageError("there must be at least one list of ranks", op=op)
    owner: dict[int, int] = {}
    for i, ranks in enumerate(ranks_per_subgroup_list):
        for r in check_ranks(ranks, world_size, op):
            if r in owner:
                raise UsageError(
                    f"Rank {r} has appeared in both subgroup "
                    f"{list(ranks_per_subgroup_list[owner[r]])} and {list(ranks)}",
                    op=op,
                )
            owner[r] = i
    kind = Kind(timeout, backend, pg_options, group_desc)
    kinds = [kind] * len(ranks_per_subgroup_list)
    groups = _new_groups(ranks_per_subgroup_list, kinds, False, True, op)
    own = [g for g in groups if g is not GroupMember.NON_GROUP_MEMBER]
    return (own[0] if own else GroupMember.NON_GROUP_MEMBER), groups


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[Group, list[Group]]:
    """Cut a group into groups of `group_size` consecutive ranks.

    Args:
        group_size: Ranks a group; it must divide the size of `group`. None for the number of
            ranks on this host (LOCAL_WORLD_SIZE, or all of them).
        group: What to cut; the world where None.
        timeout, backend, pg_options, group_desc: As in `new_group`.

    Returns:
        This rank's own group, and the list of all.

    Raises:
        UsageError: `group_size` does not divide the number of ranks.
    """
    parent = resolve(group, "new_subgroups")
    world = current_world()
    if group_size is None:
        assert world.rendezvous is not None
        group_size = world.rendezvous.local_world_size
    if group_size < 1 or group_size > parent.size() or parent.size() % group_size:
        raise UsageError(
            "the group size must not exceed the number of ranks, and must divide it",
            op="new_subgroups",
            seen=f"group_size={group_size} for {parent.size()} ranks",
        )
    lists = [parent.global_ranks[i : i + group_size] for i in range(0, parent.size(), group_size)]
    return new_subgroups_by_enumeration(lists, timeout, backend, pg_options, group_desc)


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> Group | None:
    """Split a group into disjoint groups; only the parent's members call.

    Args:
        parent_pg: What to split; the world where None.
        split_ranks: Lists of ranks of the parent (not global ranks).
        timeout, backend: The parent's where None.
        pg_options, group_desc: As in `new_group`.

    Returns:
        The group that this rank is in, or None.

    Raises:
        UsageError: A rank is out of range, or in two lists.
    """
    parent = resolve(parent_pg, "split_group")
    if not split_ranks:
        raise UsageError("split_ranks must hold at least one list of ranks", op="split_group")
    check_ranks([r for ranks in split_ranks for r in ranks], parent.size(), "split_group")
    own = None
    for ranks in split_ranks:
        if parent.rank() in ranks:
            kind = Kind(
                timeout or parent.timeout,
                backend or parent.backend_config,
                pg_options,
                group_desc,
                creation_timeout=timeout or parent.creation_timeout,
            )
            members = [parent.global_ranks[r] for r in ranks]
            (own,) = _new_groups([members], [kind], True, True, "new_group")
    return own
