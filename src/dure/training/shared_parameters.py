"""Parameters in memory that the ranks of a host share.

    rank 0's process            the host's memory             rank 1's process
    module.fc.weight.data  -->  | fc.weight | fc.bias | ... |  <--  module.fc.weight.data

Each rank has a module of its own, but `p.data` of all of them points to one place: the weights
exist once a host. To *bind* them takes one node-shared allocation for all parameters, rank 0's
values, and then `p.data = ...`, as `module.to()` does it: the parameter objects stay, with their
gradients, hooks and places in modules. The rank's previous memory is freed.

Parameters that overlap in memory (one is a view of another) form a *cluster*. Each cluster gets a
storage of its own, just as long as it is. So a parameter that is pickled or deep-copied takes along
its own bytes and not the complete memory; the copy is in ordinary memory, as it should be.

A program may put a parameter elsewhere (``module.to(dtype)``, ``p.data = ...``): it is *relocated*.
Before each update the ranks exchange whether any has relocated ones, and then all are bound again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dure.comm.ops import ReduceOp
from dure.training.memory import give_back_freed, node_shared_zeros, piece_of, side_by_side

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["SharedParameters", "clusters_of"]

_ROOT = 0


class SharedParameters:
    """Parameters in shared memory, from construction on.

    Args:
        group: The ranks; on each host they share.
        parameters: The same on all ranks; on the CPU.

    Collective:
        Construction, `barrier` and `rebind`, on all ranks of the group.

    Raises:
        UsageError: The group's backend has no shared memory.
    """

    def __init__(self, group: ProcessGroup, parameters: Sequence[torch.Tensor]) -> None:
        self._group = group
        self._parameters: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._flag = torch.zeros(1, dtype=torch.int32, device="cpu")
        self.add(parameters)

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take in more parameters."""
        self._bind(parameters)
        self._parameters += parameters
        self._addresses = [p.data_ptr() for p in self._parameters]

    def barrier(self) -> bool:
        """Wait for all ranks; return whether a parameter of any of them is relocated."""
        relocated = [p.data_ptr() for p in self._parameters] != self._addresses
        self._flag.fill_(int(relocated))
        self._group.all_reduce(self._flag, ReduceOp.MAX)
        return bool(self._flag)

    def rebind(self) -> None:
        """Put all parameters into shared memory again, with rank 0's values."""
        self._bind(self._parameters)
        self._addresses = [p.data_ptr() for p in self._parameters]

    def _bind(self, parameters: Sequence[torch.Tensor]) -> None:
        clusters = [[parameters[i] for i in c] for c in clusters_of(parameters)]
        clusters = [c for c in clusters if c[0].numel()]
        extents = [_common_extent(c) for c in clusters]
        starts = side_by_side(end - start for start, end in extents)
        memory = node_shared_zeros(self._group, starts.pop())
        bound: list[tuple[torch.Tensor, torch.Tensor]] = []
        for cluster, (start, end), offset in zip(clusters, extents, starts, strict=True):
            room = piece_of(memory, offset, end - start)
            bound += [(p, _placed(p, room, start)) for p in cluster]
        if self._group.rank() == _ROOT:
            for parameter, place in bound:
                place.copy_(parameter.detach())
        if clusters:
            self._group.broadcast(memory, _ROOT)
            self._group.barrier()
        for parameter, place in bound:
            parameter.data = place
        give_back_freed()


def _extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of `tensor`'s elements and the one after the last."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def clusters_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return the places in `tensors` of those that overlap in memory, one tuple for each cluster.

    Clusters are in the order of their first member, and their members in ascending order.
    """
    extents = [(str(t.device), *_extent_of(t), i) for i, t in enumerate(tensors)]
    clusters: list[list[int]] = []
    end, device = -1, ""
    for where, start, stop, place in sorted(extents):
        if clusters and where == device and start < end and stop > start:
            clusters[-1].append(place)
            end = max(end, stop)
        else:
            clusters.append([place])
            end, device = stop, where
    return sorted(tuple(sorted(members)) for members in clusters)


def _common_extent(cluster: Sequence[torch.Tensor]) -> tuple[int, int]:
    starts, ends = zip(*map(_extent_of, cluster), strict=True)
    return min(starts), max(ends)


def _placed(parameter: torch.Tensor, room: torch.UntypedStorage, start: int) -> torch.Tensor:
    """Return a tensor shaped as `parameter`, in `room`, which replaces the memory at `start`."""
    offset = (parameter.data_ptr() - start) // parameter.element_size()
    place = torch.empty(0, dtype=parameter.dtype, device="cpu")
    place.set_(room, offset, tuple(parameter.shape), tuple(parameter.stride()))  # pyright: ignore[reportUnknownMemberType]
    return place
