"""Who on which rank owns what: the deal of partition.py, as one rank of a group sees it.

Shards are dealt among the ranks that *divide the work*: all ranks of the group, or, where the ranks
of a host share one memory, those of this rank's host. Each of them owns one shard, which it updates
and whose state it keeps; the parameters of the other shards are new to it when their owners publish
them (publishing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from dure.parallel.optim.partition import Partition

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Holdings"]


class Holdings:
    """The owners of an optimizer's parameters.

    Args:
        group: The ranks.
        within_hosts: The ranks of each host divide the work among themselves.

    Attributes:
        parameters: All that were dealt; a parameter's place here is its number.
        mine: Those that this rank owns.
    """

    def __init__(self, group: ProcessGroup, within_hosts: bool) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._dividers: Sequence[int] = range(self._size)
        if within_hosts:
            self._dividers = next(host for host in group.hosts if self._rank in host)
        self._partition = Partition(len(self._dividers))
        self.parameters: list[torch.Tensor] = []
        self.mine: set[torch.Tensor] = set()
        self._others: set[torch.Tensor] = set()

    def deal(self, parameters: Sequence[torch.Tensor]) -> None:
        """Give new parameters their owners; the earlier ones keep theirs."""
        first = len(self.parameters)
        self._partition.deal(parameters)
        self.parameters += parameters
        for number, parameter in enumerate(parameters, first):
            (self.mine if self._owner(number) == self._rank else self._others).add(parameter)

    def _owner(self, number: int) -> int:
        """Return the group rank that owns parameter `number`."""
        return self._dividers[self._partition.owners[number]]

    def keeps(self, number: int | None) -> bool:
        """Tell whether this rank keeps the state of a parameter; None: the optimizer's own."""
        if number is None:
            return True
        return number < len(self.parameters) and self._owner(number) == self._rank

    def others_among(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of `parameters` that other ranks own."""
        return list(self._others.intersection(parameters))

    def by_owner(self, chosen: set[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return those of `chosen` that each rank of the group owns, in the order of numbers."""
        owned: list[list[torch.Tensor]] = [[] for _ in range(self._size)]
        for number, parameter in enumerate(self.parameters):
            if parameter in chosen:
                owned[self._owner(number)].append(parameter)
        return owned
