"""Strategy *shared* over several hosts: each host has the wholes once, and gathers once a step.

Ranks have rows in order, hosts as well. A rank gathers with those of its place on other hosts, and
puts their rows where its host has the wholes; its neighbours do so with theirs:

    host 0   rank 0, rank 1          rank 0 gathers with rank 2, rank 1 with rank 3: a host
    host 1   rank 2, rank 3          receives what it lacks, once

Wholes stay from then on, so backward gathers nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dure.comm.memory import heap_empty
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.reducing import padded_numel
from dure.parallel.fsdp.shared import Shared

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["SharedByHost", "why_not_by_host"]


def why_not_by_host(axes: DataAxes) -> str | None:
    """Return why hosts cannot have the wholes once each; None if they can."""
    hosts = axes.shard_group.hosts
    size = len(hosts[0])
    if any(len(ranks) != size for ranks in hosts):
        return f"its {len(hosts)} hosts have {', '.join(str(len(h)) for h in hosts)} ranks"
    if [rank for ranks in hosts for rank in ranks] != list(range(axes.size)):
        return "its ranks are not in the order of their hosts"
    return None


class SharedByHost(Shared):
    """Keeps a group's parameters whole once a host.

    Args:
        parameters: Of one dtype, cut in dimension 0, on the CPU.
        axes: Over which they are sharded; as many ranks on each host, in order.

    Collective: construction.
    """

    why = "CPU parameters, once a host"

    def __init__(self, parameters: Sequence[FSDPParameter], axes: DataAxes) -> None:
        hosts = len(axes.shard_group.hosts)
        near, self._far = axes.near_and_far(axes.size // hosts)
        self._is_gathered = False
        super().__init__(parameters, axes, near)
        self._rooms = [padded_numel(p, axes.size) * p.dtype.itemsize for p in self._parameters]
        mine = self._far.rank()
        self._others = [
            (host, self._read.rows_of(host * near.size() + near.rank()))
            for host in range(hosts)
            if host != mine
        ]

    def publish(self) -> None:
        """Put what others are to read where they read it; they gather it anew."""
        super().publish()
        self._is_gathered = False

    @property
    def begins_gather(self) -> bool:
        """See `Strategy.begins_gather`."""
        return not self._is_gathered and self._begun is None

    def unshard(self) -> ProcessGroup | None:
        """Begin to gather the rows of other hosts, once a step."""
        if not self.begins_gather:
            return None
        gathered = heap_empty(self._far.size(), sum(self._rooms), dtype=torch.uint8, must=False)
        flat = gathered[self._far.rank()]
        for shard, there in zip(self._read.shards, flat.split(self._rooms), strict=True):
            there[: shard.nbytes].copy_(shard.detach().view(-1).view(torch.uint8))
        work = self._far.all_gather_single(gathered.view(-1), flat, async_op=True)
        self._begun = gathered, self._far.size(), work
        return self._far

    def wait(self) -> Sequence[torch.Tensor]:
        """Put the rows where they belong, and wait until the host's ranks have done so."""
        self.unshard()
        gathered = self._gathered()
        if gathered is not None:
            self._spread(gathered)
            self._signals.barrier(channel=1)
            self._is_gathered = True
        return super().wait()

    def _spread(self, gathered: torch.Tensor) -> None:
        for host, rows in self._others:
            begin = 0
            for row, room in zip(rows, self._rooms, strict=True):
                row.view(-1).view(torch.uint8).copy_(gathered[host, begin : begin + row.nbytes])
                begin += room
