"""The *root* of meshes: the ranks and groups that all meshes cut from one mesh share.

A root has one group per axis. It does not share groups with other roots, even of the same ranks, so
that programs which use two meshes at once cannot mix up the order of their calls. To limit the
number of groups of a program that creates the same mesh repeatedly, only `_MOST_EQUAL` equal roots
create groups; later ones use the groups of these in turn. The first axis that contains all ranks of
the world, in order, uses the default group, as in torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dure.comm.group import ProcessGroup
from dure.comm.objects import all_gather_object
from dure.comm.subgroups import GroupOptions, new_groups
from dure.comm.world import GroupMember, World, current_world
from dure.layout import Axis, Layout

if TYPE_CHECKING:
    from dure.mesh.device_mesh import DeviceMesh

__all__ = ["Root", "live_roots"]

_MOST_EQUAL = 4
"""The number of equal roots that create groups."""
_live: weakref.WeakKeyDictionary[World, weakref.WeakSet[Root]] = weakref.WeakKeyDictionary()


class Root:
    """The ranks and groups that all meshes cut from one mesh share."""

    def __init__(self, device_type: str, ranks: tuple[int, ...], rank: int) -> None:
        self.device_type = device_type
        self.ranks = ranks
        self.rank = rank
        self.position = ranks.index(rank) if rank in ranks else None
        self.groups: dict[Axis, ProcessGroup | None] = {}
        self.flattened: dict[str, Axis] = {}
        self.meshes: dict[tuple[Layout, tuple[str, ...] | None], DeviceMesh] = {}
        self.first: DeviceMesh
        self.kinds: list[GroupOptions] = []
        self.num_followers = 0

    def find_groups(self, axes: Sequence[Axis], kinds: list[GroupOptions]) -> None:
        """Create the groups along the axes, or use those of an equal root if there are many."""
        default, self.kinds = current_world().need_default(), kinds
        made = self._made(default)
        equal = [root for root in made if root.first == self.first and root.kinds == kinds]
        equal = equal[-_MOST_EQUAL:]
        if len(equal) == _MOST_EQUAL:
            sound = [False] * default.size()
            groups = [group for root in equal for group in root.groups.values() if group]
            all_gather_object(sound, all(group.sound for group in groups), default)
            if all(sound):
                self.groups = equal[equal[0].num_followers % _MOST_EQUAL].groups
                equal[0].num_followers += 1
                return
        self.open_groups(axes, kinds)
        made.append(self)

    @staticmethod
    def _made(default: ProcessGroup) -> list[Root]:
        """Return the roots for which all ranks have created groups, oldest first."""
        return default.belongings.setdefault(Root, [])

    def rank_lists(self, layout: Layout) -> list[list[int]]:
        """Return the global ranks of each copy of a layout."""
        copies = layout.copies(len(self.ranks))
        return [[self.ranks[position] for position in copy] for copy in copies]

    def open_groups(self, axes: Sequence[Axis], kinds: Sequence[GroupOptions]) -> None:
        """Create the groups along these axes, for all ranks, in one exchange."""
        default = current_world().need_default()
        taken = any(default in root.groups.values() for root in self._made(default))
        lists: list[list[int]] = []
        kind_of: list[GroupOptions] = []
        for axis, kind in zip(axes, kinds, strict=True):
            ranks = self.rank_lists(Layout((axis,)))
            plain = kind.backend is None and kind.pg_options is None
            is_world = plain and ranks == [list(default.global_ranks)] and self._fits(default)
            if is_world and not taken:
                self.groups[axis] = default
                continue
            lists += ranks
            kind_of += [kind] * len(ranks)
        groups = new_groups(lists, kind_of) if lists else []
        mine = [g for g in groups if g is not GroupMember.NON_GROUP_MEMBER]
        left = [axis for axis in axes if axis not in self.groups]
        self.groups |= zip(left, mine or [None] * len(left), strict=True)

    def _fits(self, group: ProcessGroup) -> bool:
        """Return whether a group supports tensors on the mesh's device."""
        return self.device_type in group.device_types

    def register(self) -> None:
        """Add the root to `live_roots`, for as long as it is used."""
        _live.setdefault(current_world(), weakref.WeakSet()).add(self)


def live_roots() -> list[Root]:
    """Return this world's roots with groups, oldest first."""
    return sorted(_live.get(current_world(), ()), key=lambda root: root.first.number)
