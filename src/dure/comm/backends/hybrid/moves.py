"""The collectives of a hybrid group that move data: each byte crosses to each host once.

* broadcast: through the root's host in shared memory; lane j takes slice j to the other hosts,
  which put the slices together in shared memory. In chunks, so that the three overlap.
* all_gather: inside the hosts; then lane j exchanges the tensors of the ranks with local number j,
  j + L, ..., and shows each to its host.
* gather, scatter: one in shared memory, and messages between the root and ranks of other hosts.
* all_to_all: one in shared memory, and one of the engine's for what goes to other hosts.

The opening has been settled by the caller, so all ranks call the same and lengths agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from dure.comm.backends.base import Ticket
from dure.comm.backends.hybrid.links import Links

__all__ = ["Moves"]

_CHUNK_BYTES = 4 << 20


class Moves:
    """The large moves of one group.

    Args:
        links: The group's parts.
    """

    def __init__(self, links: Links) -> None:
        self._links = links

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Copy `tensor` of `src` to all."""
        links, hosts = self._links, self._links.hosts
        flat = _bytes(tensor)
        source, at = hosts.place_of(src)
        pending: deque[tuple[Ticket | None, list[torch.Tensor]]] = deque()
        for chunk in flat.split(_CHUNK_BYTES):
            step = -(-chunk.numel() // hosts.num_lanes)
            slices = [chunk[j * step : (j + 1) * step] for j in range(hosts.num_lanes)]
            if source == hosts.here:
                links.local.broadcast(chunk, at, False)
            ticket = None
            if links.lane is not None and slices[hosts.local].numel():
                ticket = links.lane.broadcast(slices[hosts.local], source, True)
            pending.append((ticket, slices))
            if len(pending) == 2:
                self._join_slices(*pending.popleft(), source)
        for ticket, slices in pending:
            self._join_slices(ticket, slices, source)

    def _join_slices(self, ticket: Ticket | None, slices: list[torch.Tensor], source: int) -> None:
        links, hosts = self._links, self._links.hosts
        links.wait(ticket, "broadcast")
        if source != hosts.here:
            slices = slices + [slices[0][:0]] * (len(hosts.mine) - hosts.num_lanes)
            links.local.all_gather(slices, slices[hosts.local], False)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Copy rank r's `tensor` to `outputs[r]` on all ranks."""
        links, hosts = self._links, self._links.hosts
        links.local.all_gather([outputs[r] for r in hosts.mine], tensor, False)
        for first in range(0, max(map(len, hosts.ranks)), hosts.num_lanes):
            if links.lane is not None:
                place = first + hosts.local
                parts = [
                    outputs[ranks[place]] if place < len(ranks) else tensor.new_empty(0)
                    for ranks in hosts.ranks
                ]
                links.wait(links.lane.all_gather(parts, parts[hosts.here], True), "all_gather")
            for host, ranks in enumerate(hosts.ranks):
                for lane, rank in enumerate(ranks[first : first + hosts.num_lanes]):
                    if host != hosts.here and outputs[rank].numel():
                        links.local.broadcast(outputs[rank], lane, False)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        dst: int,
        waiting: Sequence[int],
    ) -> None:
        """Copy the `tensor` of the ranks `waiting` to `outputs` on `dst`."""
        links, hosts, nothing = self._links, self._links.hosts, tensor.new_empty(0)
        source, at = hosts.place_of(dst)
        if source != hosts.here:
            if hosts.rank in waiting:
                ticket = links.mesh.send(tensor, dst, links.mesh_tags[0], True)
                links.wait(ticket, "gather")
            return
        tickets: list[Ticket] = []
        here = [nothing] * len(hosts.mine)
        for peer in waiting if outputs is not None else ():
            assert outputs is not None
            host, place = hosts.place_of(peer)
            if host == hosts.here:
                here[place] = outputs[peer]
            else:
                tickets.append(links.mesh.recv(outputs[peer], peer, links.mesh_tags[0], True))
        if any(rank in waiting for rank in hosts.mine):
            mine = tensor if hosts.rank in waiting else nothing
            links.local.gather(None if outputs is None else here, mine, at, False)
        for ticket in tickets:
            links.wait(ticket, "gather")

    def scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int
    ) -> None:
        """Copy `inputs[r]` of `src` to rank r's `tensor`."""
        links, hosts = self._links, self._links.hosts
        source, at = hosts.place_of(src)
        if source != hosts.here:
            if tensor.numel():
                links.wait(links.mesh.recv(tensor, src, links.mesh_tags[0], True), "scatter")
            return
        far = [] if inputs is None else [r for r in range(hosts.size) if r not in hosts.mine]
        tickets = [
            links.mesh.send(part, peer, links.mesh_tags[0], True)
            for peer, part in ((r, (inputs or ())[r]) for r in far)
            if part.numel()
        ]
        here = None if inputs is None else [inputs[r] for r in hosts.mine]
        links.local.scatter(tensor, here, at, False)
        for ticket in tickets:
            links.wait(ticket, "scatter")

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j."""
        links, mine = self._links, self._links.hosts.mine
        nothing = inputs[0].new_empty(0)
        far = range(links.hosts.size)
        ticket = links.mesh.all_to_all(
            [nothing if r in mine else outputs[r] for r in far],
            [nothing if r in mine else inputs[r] for r in far],
            True,
        )
        links.local.all_to_all([outputs[r] for r in mine], [inputs[r] for r in mine], False)
        links.wait(ticket, "all_to_all")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
