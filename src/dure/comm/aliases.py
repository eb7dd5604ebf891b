"""Older and other names of the same functions, accepted because programs in the field use them.

Nothing of ours calls them. Those of methods are in group/operations.py.
"""

from __future__ import annotations

from typing import Any

from dure.comm.collectives import (
    all_gather_single,
    coalescing_manager,
    reduce_scatter_single,
)
from dure.comm.group import ProcessGroup
from dure.comm.ops import ReduceOp
from dure.comm.world import GroupMember, current_world

__all__ = [  # the underscored ones are torch's own names
    "_all_gather_base",
    "_coalescing_manager",
    "_get_default_group",
    "_rank_not_in_group",
    "_reduce_scatter_base",
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
