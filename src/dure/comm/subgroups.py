"""Groups of some of the world's ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from dure.comm.call import members_code
from dure.comm.creation import GroupSpec, as_timeout, check_ranks, create_groups
from dure.comm.group import ProcessGroup
from dure.comm.rank_text import name_of_ranks
from dure.comm.splitting import splitting
from dure.comm.world import GroupMember, World, current_world, resolve
from dure.errors import CommError, CommTimeout, Desync, RendezvousTimeout, UsageError


class HasRankLists(Protocol):
    """The methods of a mesh that `new_group` uses."""

    def rank_lists(self) -> list[list[int]]:
        """Return the global ranks of this sub-mesh and of all its siblings."""
        ...


Group = ProcessGroup
"""A `ProcessGroup`, or `GroupMember.NON_GROUP_MEMBER` on ranks outside it."""


def _next_name(world: World, ranks: tuple[int, ...], local: bool) -> str:
    """Return the name of a new group, the same on all its members.

    If all ranks of the world call, it is one counter. With local synchronization only the members
    call, so there is a counter for each set of ranks. It only counts attempts in which all members
    have met (`create_groups`): members that did not meet agree on the next name.
    """
    if not local:
        world.num_created += 1
        return f"{world.num_created}"
    return f"{name_of_ranks(ranks)}/{world.created_locally.get(ranks, 0) + 1}"


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
            If None, that of the world: the timeout of `init_process_group`, or 30 minutes for
            operations and 5 for creation.
        backend: Its backend; if None, that of the world.
        pg_options: Options of the backend: ``{"verify": True}`` of any, ProcessGroupNCCL.Options
            of nccl, any object of a registered one. Options that no backend uses are refused.
        use_local_synchronization: If True, only the members call; one such group at a time.
        group_desc: A description of the group, shown in messages.
        device_id: The device that this rank is bound to; if None, that of the world.
        sort_ranks: Number the members by their global ranks; else in the order given.
        mesh: Instead of `ranks`: a new group of this rank's (sub-)mesh, in the mesh's order. All
            sub-meshes get their groups in one call.

    Returns:
        The group, or `GroupMember.NON_GROUP_MEMBER` on a rank that is not in it.

    Raises:
        UsageError: A rank is out of range or named twice.
        Desync: The members passed different arguments, or (if the world's backend compares calls)
            a rank called something else; with the lines of all ranks.
        RendezvousTimeout: A rank did not call; `missing` names it. With `use_local_synchronization`
            also if members pass different ranks.
        PeerLost: A member's process has ended.
        StoreLost: The store has died with rank 0, which served it.

    Collective:
        All ranks of the world call, in the same order, members or not (see
        `use_local_synchronization`).

    Cost:
        A barrier of the world, and some round trips to the store: milliseconds. Over nccl, if all
        ranks passed `device_id`, also that of `ncclCommSplit`.

    Example:
        ```python
        pair = dist.new_group([0, 1])
        if dist.get_rank() in (0, 1):
            dist.barrier(pair)
        ```
    """
    options = GroupOptions(timeout, backend, pg_options, group_desc, device_id)
    if mesh is not None:
        if ranks is not None or use_local_synchronization:
            raise UsageError(
                "mesh cannot be combined with ranks or use_local_synchronization",
                op="new_group",
                seen=f"ranks={ranks}, use_local_synchronization={use_local_synchronization}",
            )
        lists = mesh.rank_lists()
        return _own(_new_groups(lists, [options] * len(lists), False, False, "new_group"))
    return _new_groups([ranks], [options], use_local_synchronization, sort_ranks, "new_group")[0]


def _own(groups: Sequence[Group]) -> Group:
    """Return the group that this rank is in, or NON_GROUP_MEMBER."""
    own = (g for g in groups if g is not GroupMember.NON_GROUP_MEMBER)
    return next(own, GroupMember.NON_GROUP_MEMBER)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The arguments of `new_group` except the ranks.

    `creation_timeout` is how long creation waits for members; if None, `timeout`.
    """

    timeout: timedelta | None = None
    backend: str | None = None
    pg_options: object = None
    group_desc: str | None = None
    device_id: torch.device | None = None
    creation_timeout: timedelta | None = None


def new_groups(
    rank_lists: Sequence[Sequence[int]], options: Sequence[GroupOptions] | None = None
) -> list[Group]:
    """Create several groups at once, which may overlap, such as those of all axes of a mesh.

    Args:
        rank_lists: The global ranks of each group, in the order of their ranks in it.
        options: Of each group.

    Returns:
        The groups, `GroupMember.NON_GROUP_MEMBER` for those that this rank is not in.

    Raises, Collective:
        As `new_group`.

    Cost:
        That of one group, and one request per group that this rank is in (comm/creation.py).
    """
    options = [GroupOptions()] * len(rank_lists) if options is None else options
    return _new_groups(rank_lists, options, False, False, "new_groups")


def _new_groups(
    rank_lists: Sequence[Sequence[int] | None],
    options: Sequence[GroupOptions],
    local: bool,
    sort: bool,
    op: str,
) -> list[Group]:
    world = current_world()
    default = world.need_default()
    limits = [as_timeout(each.timeout, default.timeout) for each in options]
    creation = [
        each.creation_timeout or as_timeout(each.timeout, default.creation_timeout)
        for each in options
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
            backend=(each.backend or default.backend_config).lower(),
            timeout=limit,
            desc=each.group_desc or "",
            pg_options=each.pg_options,
            device_id=each.device_id or default.bound_device_id,
            creation_timeout=soon,
            why="asked for" if each.backend else "as the default group",
            local=local,
        )
        for ranks, each, limit, soon in zip(lists, options, limits, creation, strict=True)
    ]
    rendezvous = world.rendezvous
    assert rendezvous is not None
    rendezvous.require_store(op)
    if not local:
        _announce(default, lists, max(creation, default=default.creation_timeout))
    mine = [spec for spec in specs if default.rank() in spec.global_ranks]
    soonest = max(creation, default=default.creation_timeout)
    with splitting(default, [] if local else specs, soonest) as split:
        made = create_groups(world, rendezvous.store, default.rank(), mine) if mine else []
        by_name = {group.group_name: group for group in made}
        split([by_name.get(spec.name) for spec in specs])
    return [by_name.get(spec.name, GroupMember.NON_GROUP_MEMBER) for spec in specs]


def _announce(default: ProcessGroup, rank_lists: Sequence[Sequence[int]], limit: timedelta) -> None:
    """Compare the groups that the ranks of the world make, before waiting for their members.

    A broken world cannot compare: then members find differences in the store, as they do with local
    synchronization. That is how survivors of a death make new groups.
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
            return  # the world's own timeout was shorter
        raise RendezvousTimeout(
            "not all ranks called to make a group",
            op="new_group",
            group=default.group_name,
            rank=default.rank(),
            world_size=default.size(),
            elapsed_s=limit.total_seconds(),
            came=tuple(sorted(set(range(default.size())).difference(error.missing))),
            missing=error.missing,
            fix="All ranks of the world call new_group, members or not; only members do with "
            "use_local_synchronization=True.",
        ) from None
    except CommError:
        pass


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
        timeout: As in `new_group`.
        backend: As in `new_group`.
        pg_options: As in `new_group`.
        group_desc: As in `new_group`.

    Returns:
        This rank's own group (NON_GROUP_MEMBER if it is in none), and the list of all.

    Raises:
        UsageError: A rank is out of range, or in two groups; and the errors of `new_group`.

    Collective:
        All ranks of the world call.

    Example:
        ```python
        own, both = dist.new_subgroups_by_enumeration([[0], [1]])
        assert own is both[dist.get_rank()] and own.size() == 1
        ```
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
    options = GroupOptions(timeout, backend, pg_options, group_desc)
    of_each = [options] * len(ranks_per_subgroup_list)
    groups = _new_groups(ranks_per_subgroup_list, of_each, False, True, op)
    return _own(groups), groups


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
        group_size: Number of ranks in each group; it must divide the size of `group`. None: the
            number of ranks on this host (LOCAL_WORLD_SIZE, or all of them).
        group: The group to cut; the world if None.
        timeout: As in `new_group`.
        backend: As in `new_group`.
        pg_options: As in `new_group`.
        group_desc: As in `new_group`.

    Returns:
        This rank's own group, and the list of all.

    Raises:
        UsageError: `group_size` does not divide the number of ranks; and the errors of `new_group`.

    Collective:
        All ranks of the world call.

    Example:
        ```python
        own, groups = dist.new_subgroups(1)
        assert own.size() == 1 and len(groups) == dist.get_world_size()
        ```
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
        parent_pg: The group to split; the world if None.
        split_ranks: Lists of ranks of the parent (not global ranks).
        timeout: As in `new_group`; that of the parent if None.
        pg_options: As in `new_group`.
        group_desc: As in `new_group`.
        backend: As in `new_group`; that of the parent if None.

    Returns:
        The group that this rank is in, or None.

    Raises:
        UsageError: A rank is out of range, or in two lists; and the errors of `new_group`.

    Collective:
        The ranks of the new groups call. Over nccl they are split off if these are all ranks of the
        parent, and all passed `device_id` (docs/gpu.md).

    Example:
        ```python
        own = dist.split_group(split_ranks=[[0], [1]])
        assert own.size() == 1
        ```
    """
    parent = resolve(parent_pg, "split_group")
    if not split_ranks:
        raise UsageError("split_ranks must hold at least one list of ranks", op="split_group")
    named = check_ranks([r for ranks in split_ranks for r in ranks], parent.size(), "split_group")
    config, limit = backend or parent.backend_config, timeout or parent.creation_timeout
    options = GroupOptions(
        timeout or parent.timeout, config, pg_options, group_desc, parent.bound_device_id, limit
    )
    lists = [tuple(parent.global_ranks[r] for r in ranks) for ranks in split_ranks]
    specs = [
        GroupSpec(
            name="", global_ranks=members, backend=config.lower(), timeout=limit,
            device_id=parent.bound_device_id,
        )
        for members in lists
    ]  # fmt: skip
    me, own = parent.global_ranks[parent.rank()], None
    # All ranks of the parent call only if each is in a list.
    with splitting(parent, specs if len(named) == parent.size() else [], limit) as split:
        for members in lists:
            if me in members:
                (own,) = _new_groups([members], [options], True, True, "new_group")
        split([own if me in members else None for members in lists])
    return own
