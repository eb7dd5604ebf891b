"""Older and other names of the same functions, accepted because programs in the field use them.

Nothing of ours calls them. Those of methods are in group/operations.py.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from dure.comm.coalescing import coalescing_manager
from dure.comm.collectives import all_gather_single, reduce_scatter_single
from dure.comm.group import ProcessGroup
from dure.comm.ops import ReduceOp
from dure.comm.world import GroupMember, current_world, group_named, resolve
from dure.store import Store

__all__ = [  # the underscored ones are torch's own names
    "_all_gather_base",
    "_coalescing_manager",
    "_get_default_group",
    "_get_default_store",
    "_get_pg_default_device",
    "_get_process_group_name",
    "_rank_not_in_group",
    "_reduce_scatter_base",
    "_resolve_process_group",
    "_set_pg_timeout",
    "_world",
    "all_gather_into_tensor",
    "reduce_op",
    "reduce_scatter_tensor",
]

all_gather_into_tensor = all_gather_single
reduce_scatter_tensor = reduce_scatter_single
_all_gather_base = all_gather_single
_reduce_scatter_base = reduce_scatter_single
_coalescing_manager = coalescing_manager
reduce_op = ReduceOp


def _get_default_group() -> ProcessGroup:
    """Return the default group."""
    return current_world().need_default()


def _rank_not_in_group(group: Any) -> bool:
    """Tell whether this rank is outside `group`."""
    return group is GroupMember.NON_GROUP_MEMBER


def _get_default_store() -> Store:
    """Return the store of the default group's rendezvous."""
    _get_default_group()
    rendezvous = current_world().rendezvous
    assert rendezvous is not None
    return rendezvous.store


def _get_pg_default_device(group: ProcessGroup | None = None) -> torch.device:
    """Return the kind of device that a group prefers for its own tensors."""
    return torch.device(resolve(group, "_get_pg_default_device").message_device.type)


def _get_process_group_name(pg: ProcessGroup) -> str:
    return pg.group_name


def _resolve_process_group(group_name: str) -> ProcessGroup:
    """Return the group of a name."""
    return group_named(group_name, "_resolve_process_group")


def _set_pg_timeout(timeout: timedelta, group: ProcessGroup | None = None) -> None:
    """Set the timeout of a group."""
    resolve(group, "_set_pg_timeout").set_timeout(timeout)


class _World:
    """The groups of this rank, as copies: under the names of torch's container."""

    @property
    def default_pg(self) -> ProcessGroup | None:
        """The default group."""
        return current_world().default

    @property
    def group_count(self) -> int:
        """How many groups all ranks have made together, the default group included.

        It is the same on all ranks, and the name of the next group.
        """
        world = current_world()
        return world.num_created + (world.default is not None)

    @group_count.setter
    def group_count(self, value: int) -> None:
        world = current_world()
        world.num_created = value - (world.default is not None)

    @property
    def pg_names(self) -> dict[ProcessGroup, str]:
        """The name of each group."""
        return {pg: name for name, pg in current_world().groups.items()}

    @property
    def pg_group_ranks(self) -> dict[ProcessGroup, dict[int, int]]:
        """For each group the group rank of each global rank."""
        return {pg: dict(pg.group_rank_of) for pg in current_world().groups.values()}

    @property
    def pg_map(self) -> dict[ProcessGroup, tuple[str, Store]]:
        """The backend and the store of each group."""
        groups = current_world().groups.values()
        return {pg: (pg.backend_name, _get_default_store()) for pg in groups}


_world = _World()
