"""Strategy *shared* over several hosts: one copy per host, one gather per step.

Ranks have rows in order, hosts as well. A rank gathers with the ranks of the same position on
other hosts, and copies their rows into its host's memory; so do the other ranks of its host:

    host 0   rank 0, rank 1          rank 0 gathers with rank 2, rank 1 with rank 3: a host
    host 1   rank 2, rank 3          receives what it lacks, once

The rows stay until the next step, so backward gathers nothing.
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
    """Return why hosts cannot have the parameters once each; None if they can."""
    hosts = axes.shard_group.hosts
    size = len(hosts[0])
    if any(len(ranks) != size for ranks in hosts):
        return f"its {len(hosts)} hosts have {', '.join(str(len(h)) for h in hosts)} ranks"
    if [rank for ranks in hosts for rank in ranks] != list(range(axes.size)):
        return "its ranks are not in the order of their hosts"
    return None


class SharedByHost(Shared):
    """Keeps a group's unsharded parameters once per host.

    Args:
        parameters: Of one dtype, cut in dimension 0, on the CPU.
        axes: Over which they are sharded; as many ranks on each host, in order.

    Collective:
        Construction.
    """

    why = "CPU parameters, once a host"

    def __init__(self, parameters: Sequence[FSDPParameter], axes: DataAxes) -> None:
        num_hosts = axes.shard_group.num_hosts
        intra_node, self._inter_node = axes.intra_and_inter_node(axes.size // num_hosts)
        self._is_gathered = False
        self._gathered_versions: list[int] = []
        super().__init__(parameters, axes, intra_node)
        self._rooms = [padded_numel(p, axes.size) * p.dtype.itemsize for p in self._parameters]
        self._others = [self._rows_of_others(n, intra_node) for n in range(len(parameters))]

    def _rows_of_others(
        self, number: int, intra_node: ProcessGroup
    ) -> list[tuple[int, torch.Tensor]]:
        """Return the rows of a parameter that this rank copies, without its own.

        Args:
            number: Of the parameter.
            intra_node: The ranks of this host.

        Returns:
            Pairs of a host and bytes [hosts, k]: the rows of it and of the hosts after it. There
            are at most three pairs, for any number of hosts: those before this one, those after it,
            and a host with fewer rows than a full part.
        """
        block = self._read.bytes_of(number)
        size, mine, room = intra_node.size(), self._inter_node.rank(), self._rooms[number]
        num_full, rest = divmod(block.numel(), max(room, 1))  # ranks with full parts; bytes left
        end = max(0, -(-(num_full - intra_node.rank()) // size))  # hosts with full parts
        spans = [(0, min(mine, end), room), (mine + 1, end, room)]
        last_host, place = divmod(num_full, size)
        if place == intra_node.rank() and last_host != mine:
            spans.append((last_host, last_host + 1, rest))
        found: list[tuple[int, torch.Tensor]] = []
        for first, stop, nbytes in spans:
            if first < stop and nbytes:
                begin = (first * size + intra_node.rank()) * room
                found.append(
                    (first, block.as_strided((stop - first, nbytes), (size * room, 1), begin))
                )
        return found

    def publish(self) -> None:
        """Write what other ranks read; other hosts gather it again."""
        super().publish()
        self._is_gathered = False

    def is_stale(self, accumulates: bool = False) -> bool:
        """Ask all ranks, as each knows of its own rows only, where they are left unsharded."""
        if not self._versions:
            return False
        return self._differ_anywhere(self._gathered_versions, accumulates)

    @property
    def begins_gather(self) -> bool:
        """See `Strategy.begins_gather`."""
        return not self._is_gathered and self._pending_gather is None

    def unshard(self) -> ProcessGroup | None:
        """Begin to gather the rows of other hosts, once a step."""
        if not self.begins_gather:
            return None
        gathered = heap_empty(
            self._inter_node.size(), sum(self._rooms), dtype=torch.uint8, must=False
        )
        flat = gathered[self._inter_node.rank()]
        for shard, there in zip(self._read.shards, flat.split(self._rooms), strict=True):
            there[: shard.nbytes].copy_(shard.detach().view(-1).view(torch.uint8))
        self._gathered_versions = [p.version for p in self._parameters]
        work = self._inter_node.all_gather_single(gathered.view(-1), flat, async_op=True)
        self._pending_gather = gathered, self._inter_node.size(), work
        return self._inter_node

    def wait(self) -> Sequence[torch.Tensor]:
        """Put the rows where they belong, and wait until the host's ranks have done so."""
        self.unshard()
        gathered = self._finish_gather()
        if gathered is not None:
            self._spread(gathered)
            self._signals.barrier(channel=1)
            self._is_gathered = True
        return super().wait()

    def _spread(self, gathered: torch.Tensor) -> None:
        begin = 0
        for others, room in zip(self._others, self._rooms, strict=True):
            for host, rows in others:
                count, nbytes = rows.shape
                rows.copy_(gathered[host : host + count, begin : begin + nbytes])
            begin += room
