"""Parameters in memory that the ranks of a host share.

    rank 0's process            the host's memory             rank 1's process
    module.fc.weight.data  -->  | fc.weight | fc.bias | ... |  <--  module.fc.weight.data

Each rank has a module of its own, but `p.data` of all of them points to one place: the weights
exist once a host. *Moving in* takes one allocation (`dure.host_shared_empty`) for all parameters of
the optimizer, rank 0's values, and then `p.data = ...`, as `module.to()` does it: the parameter
objects stay, with their gradients, hooks and places in modules. What a rank had before is freed.

Each cluster of parameters (partition.py: those that overlap) gets a storage of its own, just as
long as it is. So a parameter that is pickled or deep-copied takes along its own bytes and not the
whole memory; the copy lies in ordinary memory, as it should.

A program may put a parameter elsewhere (``module.to(dtype)``, ``p.data = ...``): it has *strayed*.
Before each update the ranks tell each other whether anybody's has, and then all move in again.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dure.comm.ops import ReduceOp
from dure.errors import OptimizerError
from dure.parallel.optim.partition import clusters_of, extent_of

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["SharedParameters"]

_ALIGNMENT = 64
_ROOT = 0


class SharedParameters:
    """The parameters of one optimizer, in shared memory from construction on.

    Args:
        group: The ranks; on each host they share.
        parameters: The same on all ranks; on the CPU.

    Collective: construction, `meet` and `move_in`, on all ranks of the group.

    Raises:
        OptimizerError: A parameter is not on the CPU.
        UsageError: The group's backend has no shared memory.
    """

    def __init__(self, group: ProcessGroup, parameters: Sequence[torch.Tensor]) -> None:
        self._group = group
        self._parameters: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._flag = torch.zeros(1, dtype=torch.int32)
        self.add(parameters)

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take in more parameters."""
        elsewhere = {str(p.device) for p in parameters if p.device.type != "cpu"}
        if elsewhere:
            raise OptimizerError(
                "host_shared_parameters=True is for parameters on the CPU",
                seen=f"parameters are on {', '.join(sorted(elsewhere))}",
                fix="Leave it out; the optimizer's state is sharded all the same.",
            )
        self._move_in(parameters)
        self._parameters += parameters
        self._addresses = [p.data_ptr() for p in self._parameters]

    def meet(self) -> bool:
        """Wait until all ranks are here; tell whether a parameter of any of them has strayed."""
        strayed = [p.data_ptr() for p in self._parameters] != self._addresses
        self._flag.fill_(int(strayed))
        self._group.all_reduce(self._flag, ReduceOp.MAX)
        return bool(self._flag)

    def move_in(self) -> None:
        """Put all parameters into shared memory again, with rank 0's values."""
        self._move_in(self._parameters)
        self._addresses = [p.data_ptr() for p in self._parameters]

    def _move_in(self, parameters: Sequence[torch.Tensor]) -> None:
        clusters = [[parameters[i] for i in c] for c in clusters_of(parameters)]
        clusters = [c for c in clusters if c[0].numel()]
        extents = [_common_extent(c) for c in clusters]
        starts = [0]
        for start, end in extents:
            length = end - start
            starts.append(starts[-1] + -(-length // _ALIGNMENT) * _ALIGNMENT)
        memory = self._group.host_shared_empty(starts.pop(), dtype=torch.uint8)
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        for cluster, (start, end), offset in zip(clusters, extents, starts, strict=True):
            room = torch.frombuffer(
                memory.numpy(), dtype=torch.uint8, count=end - start, offset=offset
            )
            moved += [(p, _placed(p, room.untyped_storage(), start)) for p in cluster]
        if self._group.rank() == _ROOT:
            for parameter, place in moved:
                place.copy_(parameter.detach())
        if clusters:
            self._group.broadcast(memory, _ROOT)
            self._group.barrier()
        for parameter, place in moved:
            parameter.data = place
        _give_back_memory()


def _common_extent(cluster: Sequence[torch.Tensor]) -> tuple[int, int]:
    starts, ends = zip(*map(extent_of, cluster), strict=True)
    return min(starts), max(ends)


def _placed(parameter: torch.Tensor, room: torch.UntypedStorage, start: int) -> torch.Tensor:
    """Return a tensor shaped as `parameter`, in `room`, which stands for the memory at `start`."""
    offset = (parameter.data_ptr() - start) // parameter.element_size()
    place = torch.empty(0, dtype=parameter.dtype)
    place.set_(room, offset, tuple(parameter.shape), tuple(parameter.stride()))  # pyright: ignore[reportUnknownMemberType]
    return place


def _give_back_memory() -> None:
    """Have the C library return freed memory to the system: it keeps what lies between the used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
