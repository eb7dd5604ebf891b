"""Which rank updates which parameter.

A *shard* is what one rank updates. Parameters are dealt out whole, because most optimizers look at
whole parameters (a norm, a factored moment), and by size: the largest first, each to the shard that
has least so far. With n shards and sizes s_1 >= s_2 >= ... no shard gets more than the mean plus
s_1. Frozen parameters weigh nothing: they have no state and need no update.

Parameters that overlap in memory (one is a view of another) form a *cluster* and have one owner,
which updates them one after another as an unsharded optimizer does.

The deal is arithmetic on what all ranks have alike, so that nobody needs to tell anybody. Groups
are dealt in their order, and a group that is added later does not move the earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Partition", "clusters_of", "extent_of"]


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
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
    extents = [(str(t.device), *extent_of(t), i) for i, t in enumerate(tensors)]
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


class Partition:
    """Owners of parameters, which are numbered in the order in which they are dealt.

    Args:
        num_shards: How many owners there are.

    Attributes:
        owners: The shard of each parameter.
        loads: Trained elements of each shard.
    """

    def __init__(self, num_shards: int) -> None:
        self.owners: list[int] = []
        self.loads = [0] * num_shards
        self._parameters: list[torch.Tensor] = []

    def deal(self, group: Sequence[torch.Tensor]) -> None:
        """Give each of `group` an owner."""
        num_dealt = len(self._parameters)
        self._parameters += group
        self.owners += [-1] * len(group)
        new = [c for c in clusters_of(self._parameters) if c[-1] >= num_dealt]
        weights = {c: sum(self._weight(i) for i in c if i >= num_dealt) for c in new}
        for cluster in sorted(new, key=lambda c: (-weights[c], c)):
            owner = self.owners[cluster[0]]
            if owner < 0:
                owner = self.loads.index(min(self.loads))
            for place in cluster:
                self.owners[place] = owner
            self.loads[owner] += weights[cluster]

    def _weight(self, place: int) -> int:
        parameter = self._parameters[place]
        return parameter.numel() if parameter.requires_grad else 0
