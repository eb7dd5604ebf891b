"""`ProcessGroup`: a set of ranks that communicate.

`core` is membership, and how an operation is run; `operations` says what each one checks, and has
the fast path; the class adds the names under which code for torch's C++ groups calls the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from dure.comm.group.core import GroupSpec, started
from dure.comm.group.operations import Operations
from dure.comm.monitored import monitored_barrier
from dure.comm.ops import ReduceOp
from dure.comm.work import Work
from dure.errors import UsageError

__all__ = ["GroupSpec", "ProcessGroup", "started"]


class ProcessGroup(Operations):
    """The ranks of one group, seen from one of them.

    All ranks must call the collectives of a group in the same order. Groups are independent of
    each other, and point-to-point messages are independent of collectives. Ranks given to methods
    are group ranks; those of the public functions (`dure.broadcast`, ...) are global ranks.

    Threads: one operation at a time; `Work` objects may be used from any thread. Tensors belong to
    an operation until it has ended.
    """

    # ---- methods of torch's C++ groups: all return a `Work`; none is ours ----------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Start `all_reduce`; `opts` is a reduction or an object with `reduceOp`."""
        return started(self.all_reduce(_one(tensors, "allreduce"), _reduction(opts), async_op=True))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        """Start `all_reduce_coalesced`."""
        return started(self.all_reduce_coalesced(tensors, _reduction(opts), async_op=True))

    def allgather(self, outputs: Any, tensors: Any, opts: object = None) -> Work:
        """Start `all_gather`."""
        lists = outputs[0] if outputs and isinstance(outputs[0], (list, tuple)) else outputs
        return started(self.all_gather(lists, _one(tensors, "allgather"), async_op=True))

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: object = None
    ) -> Work:
        """Start `all_to_all`."""
        return started(self.all_to_all(outputs, inputs, async_op=True))

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, and name who does not come."""
        monitored_barrier(self, timeout, wait_all_ranks)


def _reduction(opts: Any) -> object:
    return ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _one(tensors: Sequence[torch.Tensor] | torch.Tensor, op: str) -> torch.Tensor:
    """Return the tensor of a list of one, the form in which C++ groups take it."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError("expected a list of one tensor", op=op, seen=f"{len(tensors)} tensors")
    return tensors[0]
