"""Older and other names of the same operations, accepted because programs in the field use them.

Nothing of ours calls them. The functions are those that torch.distributed has renamed; the methods
of `EngineNames` are those of torch's C++ process groups, which always return a `Work`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch

from dure.comm.coalescing import coalescing_manager
from dure.comm.collectives import all_gather_single, reduce_scatter_single
from dure.comm.monitored import monitored_barrier
from dure.comm.ops import ReduceOp
from dure.comm.work import Work
from dure.comm.world import GroupMember, current_world
from dure.errors import UsageError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = [  # the underscored ones are torch's own names
    "EngineNames",
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


def _one(tensors: Sequence[torch.Tensor] | torch.Tensor, op: str) -> torch.Tensor:
    """Return the tensor of a list of one, the form in which C++ groups take it."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError("expected a list of one tensor", op=op, seen=f"{len(tensors)} tensors")
    return tensors[0]


class EngineNames:
    """Methods of torch's C++ process groups, on top of ours. All return a `Work`."""

    def _self(self) -> ProcessGroup:
        return cast("ProcessGroup", self)

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Start `all_reduce`; `opts` is a reduction or an object with `reduceOp`."""
        op = ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        work = self._self().all_reduce(_one(tensors, "allreduce"), op, async_op=True)
        assert work is not None
        return work

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        """Start `all_reduce_coalesced`."""
        op = ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        work = self._self().all_reduce_coalesced(tensors, op, async_op=True)
        assert work is not None
        return work

    def allgather(self, outputs: Any, tensors: Any, opts: object = None) -> Work:
        """Start `all_gather`."""
        lists = outputs[0] if outputs and isinstance(outputs[0], (list, tuple)) else outputs
        work = self._self().all_gather(
            cast("Sequence[torch.Tensor]", lists), _one(tensors, "allgather"), async_op=True
        )
        assert work is not None
        return work

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: object = None
    ) -> Work:
        """Start `all_to_all`."""
        work = self._self().all_to_all(outputs, inputs, async_op=True)
        assert work is not None
        return work

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, and name who does not come."""
        monitored_barrier(self._self(), timeout, wait_all_ranks)
