"""Which rank updates which parameter.

Parameters are divided among some ranks of a group: all of them, or, if the ranks of a host share
one memory, those of this rank's host. The parameters that one rank updates are its *shard*; it
keeps the state of these only.

Each parameter is assigned to one rank, because most optimizers need complete parameters (a norm, a
factored moment), and by size: the largest first, each to the shard that has least so far. With n
shards and sizes s_1 >= s_2 >= ... no shard gets more than the mean plus s_1. Frozen parameters
weigh nothing: they have no state and need no update.

Parameters that overlap in memory (one is a view of another) form a *cluster* and have one owner,
which updates them one after another as an unsharded optimizer does.

All ranks compute the same assignment from the same data, so it needs no communication.
Groups of parameters are assigned in their order, and one that is added later does not move the
earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dure.training.shared_parameters import clusters_of

__all__ = ["ParameterPartition"]


class ParameterPartition:
    """The owners of an optimizer's parameters, as one of the ranks sees them.

    Args:
        ranks: Those among which parameters are divided; the same on all of them.
        rank: This one.

    Attributes:
        parameters: All that were assigned; a parameter's place here is its number.
        owners: The rank that owns each parameter.
        loads: Trained elements that each of `ranks` owns.
        mine: The parameters that this rank owns.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self.parameters: list[torch.Tensor] = []
        self.owners: list[int] = []
        self.loads = dict.fromkeys(ranks, 0)
        self.mine: set[torch.Tensor] = set()
        self._others: set[torch.Tensor] = set()

    def assign(self, parameters: Sequence[torch.Tensor]) -> None:
        """Give new parameters their owners; the earlier ones keep theirs."""
        first = len(self.parameters)
        self.parameters += parameters
        self.owners += [-1] * len(parameters)
        new = [c for c in clusters_of(self.parameters) if c[-1] >= first]
        weights = {c: sum(self._weight(i) for i in c if i >= first) for c in new}
        for cluster in sorted(new, key=lambda c: (-weights[c], c)):
            owner = self.owners[cluster[0]]
            if owner < 0:
                owner = min(self._ranks, key=self.loads.__getitem__)
            for number in cluster:
                self.owners[number] = owner
            self.loads[owner] += weights[cluster]
        for owner, parameter in zip(self.owners[first:], parameters, strict=True):
            (self.mine if owner == self._rank else self._others).add(parameter)

    def _weight(self, number: int) -> int:
        parameter = self.parameters[number]
        return parameter.numel() if parameter.requires_grad else 0

    def keeps(self, number: int | None) -> bool:
        """Tell whether this rank keeps the state of a parameter; None: the optimizer's own."""
        if number is None:
            return True
        return number < len(self.owners) and self.owners[number] == self._rank

    def others_among(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of `parameters` that other ranks own."""
        return list(self._others.intersection(parameters))

    def by_owner(self, chosen: set[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return those of `chosen` that each of the ranks owns, in the order of numbers."""
        owned: dict[int, list[torch.Tensor]] = {rank: [] for rank in self._ranks}
        for owner, parameter in zip(self.owners, self.parameters, strict=True):
            if parameter in chosen:
                owned[owner].append(parameter)
        return list(owned.values())
