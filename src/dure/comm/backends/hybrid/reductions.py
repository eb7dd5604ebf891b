"""Reductions of a hybrid group: inside the hosts in shared memory, between them by the lanes.

Order: the ranks of a host are folded in the order of ranks, then the hosts' partial results in the
order of hosts. Sums and products of 16 and 8 bit floats stay float32 until the end, between hosts
too, and are rounded once. That is the same on all ranks, and in every run; on ranks that are
numbered host by host it differs from the order of one host only in where the brackets are.

An all_reduce or a reduce goes through in *chunks*, each cut into one *slice* a lane:

1. shared memory: reduce-scatter, slice j of this host's partial result to the rank of lane j;
2. lane j: reduce slice j over the hosts, in one operation of the engine where the order of hosts
   cannot matter (two hosts, integers, minima), else by all_to_all, a fold, and all_gather;
3. shared memory: all-gather the slices into the tensors.

Chunks overlap: while the network has one, step 1 of the next and step 3 of the one before run.
Every rank of a host does the same steps in the same order, in a lane or not.

Cost: between hosts each lane sends 2 (H-1)/H of its slices, so a host sends 2 (H-1)/H S in all,
where plain Gloo sends that for every rank; a reduce sends S from each host to the root's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from dure.comm.backends.hybrid.hosts import Hosts
from dure.comm.backends.hybrid.links import Links
from dure.comm.ops import ReduceOp
from dure.comm.reduction import reduce_in_order

__all__ = ["Reductions", "fold_by_host"]

CHUNK_BYTES = 8 << 20
"""Of a chunk, all slices together; see docs/log.md."""
_DEPTH = 3

Steps = Iterator[None]
_ROUNDED = ("SUM", "AVG", "PRODUCT")


def _carried(dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
    """Return the dtype that partial results of `dtype` have."""
    if op.name not in _ROUNDED or not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    if dtype.is_complex:
        return torch.complex64 if dtype.itemsize < 8 else dtype
    return torch.float32 if dtype.itemsize < 4 else dtype


def _order_matters(dtype: torch.dtype, op: ReduceOp) -> bool:
    return op.name in _ROUNDED and (dtype.is_floating_point or dtype.is_complex)


def _partial(op: ReduceOp) -> ReduceOp:
    """Return what partial results are folded with."""
    return ReduceOp.SUM if op.name == "AVG" else op


def fold_by_host(
    hosts: Hosts, parts: Sequence[torch.Tensor], op: ReduceOp, out: torch.Tensor
) -> None:
    """Reduce the ranks' `parts` into `out`, in the order that the text of this module tells."""
    carried, partial = _carried(out.dtype, op), _partial(op)
    sums: list[torch.Tensor] = []
    for ranks in hosts.ranks:
        total = torch.empty(out.numel(), dtype=carried)
        reduce_in_order([parts[r].to(carried) for r in ranks], partial, total)
        sums.append(total)
    reduce_in_order(sums, partial, sums[0])
    _land(sums[0], out, op, hosts.size)


def _land(total: torch.Tensor, out: torch.Tensor, op: ReduceOp, size: int) -> None:
    if op.name == "AVG":
        total.div_(size)
    if out.data_ptr() != total.data_ptr():
        out.detach().view(-1).copy_(total)


class Reductions:
    """The large reductions of one group; the opening has been begun or settled by the caller.

    Args:
        links: The group's parts.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._scratch: dict[int, torch.Tensor] = {}

    # ---- all_reduce and reduce -------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, settle: Iterator[object]) -> None:
        """Reduce `tensor` in place; advance `settle` once before anything crosses the network."""
        self._in_chunks(tensor, op, None, settle)

    def reduce(
        self, tensor: torch.Tensor, op: ReduceOp, dst: int, settle: Iterator[object]
    ) -> None:
        """Reduce `tensor` into that of `dst`."""
        self._in_chunks(tensor, op, dst, settle)

    def _in_chunks(
        self, tensor: torch.Tensor, op: ReduceOp, dst: int | None, settle: Iterator[object]
    ) -> None:
        flat = tensor.detach().view(-1)
        carried = _carried(flat.dtype, op)
        length = max(1, CHUNK_BYTES // carried.itemsize)
        pending: deque[Steps] = deque()
        for number, chunk in enumerate(flat.split(length)):
            steps = self._chunk(chunk, op, dst, number, settle)
            next(steps)
            _advance(pending)
            pending.append(steps)
        while pending:
            _advance(pending)

    def _chunk(
        self,
        chunk: torch.Tensor,
        op: ReduceOp,
        dst: int | None,
        number: int,
        settle: Iterator[object],
    ) -> Steps:
        """Do the three steps for one chunk; yields while the network is at work."""
        links, hosts = self._links, self._links.hosts
        carried = _carried(chunk.dtype, op)
        slices = _slices(chunk, hosts)
        mine = slices[hosts.local]
        total = self._take_scratch(number, mine.numel(), carried)
        wide = [s if s.dtype is carried else s.to(carried) for s in slices]
        links.local.reduce_scatter(total, wide, _partial(op), False)
        next(settle, None)
        root = None if dst is None else hosts.place_of(dst)
        for _ in self._across(total, op, None if root is None else root[0]):
            yield
        if root is not None and root[0] != hosts.here:
            return
        if hosts.lane is not None:
            out = total if carried is chunk.dtype else torch.empty_like(mine)
            _land(total, out, op, hosts.size)
            total = out
        else:
            total = mine
        if root is None:
            links.local.all_gather(slices, total, False)
        else:
            links.local.gather(slices if hosts.rank == dst else None, total, root[1], False)

    def _across(self, total: torch.Tensor, op: ReduceOp, root: int | None) -> Steps:
        """Reduce a slice over the hosts, to `root` or to all; yields once or twice on every rank.

        All ranks of a host must yield equally often, because their other steps happen between.
        """
        links, partial = self._links, _partial(op)
        lane = links.lane if total.numel() else None
        if links.num_hosts == 2 or not _order_matters(total.dtype, op):
            ticket = None
            if lane is not None and root is None:
                ticket = lane.all_reduce(total, partial, True)
            elif lane is not None and root is not None:
                ticket = lane.reduce(total, root, partial, True)
            yield
            links.wait(ticket, "all_reduce")
            return
        num, ticket = links.num_hosts, None
        rows = -(-total.numel() // num)
        padded, taken = total.new_zeros(num * rows), total.new_empty(num * rows)
        if lane is not None:
            padded[: total.numel()] = total
            ticket = lane.all_to_all_single(taken, padded, True)
        yield
        links.wait(ticket, "all_reduce")
        if lane is not None:
            row = total.new_empty(rows)
            reduce_in_order(list(taken.view(num, rows)), partial, row)
            if root is None:
                ticket = lane.all_gather_single(padded, row, True)
            else:
                out = list(padded.view(num, rows)) if root == links.here else None
                ticket = lane.gather(out, row, root, True)
        yield
        links.wait(ticket, "all_reduce")
        total.copy_(padded[: total.numel()])

    def _take_scratch(self, number: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a slice; chunks that overlap have their own."""
        nbytes = length * dtype.itemsize
        key = number % _DEPTH
        have = self._scratch.get(key)
        if have is None or have.numel() < nbytes:
            have = self._scratch[key] = torch.empty(max(nbytes, 4096), dtype=torch.uint8)
        return have[:nbytes].view(dtype)

    # ---- reduce_scatter --------------------------------------------------------------------------

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp
    ) -> None:
        """Reduce `inputs[r]` of all ranks into rank r's `output`; the opening is settled.

        In rounds: in round k lane j sees to the rank with local number j + k L of every host, so
        that every part crosses the network once for each other host.
        """
        hosts, num_lanes = self._links.hosts, self._links.hosts.num_lanes
        for first in range(0, max(map(len, hosts.ranks)), num_lanes):
            self._round(output, inputs, op, first)

    def _round(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, first: int
    ) -> None:
        links, hosts = self._links, self._links.hosts
        carried, partial = _carried(output.dtype, op), _partial(op)
        nothing = torch.empty(0, dtype=carried)

        def part(host: int, lane: int) -> torch.Tensor:
            ranks = hosts.ranks[host]
            return inputs[ranks[first + lane]] if first + lane < len(ranks) else nothing

        wide = [nothing] * len(hosts.mine)
        for lane in range(hosts.num_lanes):
            pieces = [part(h, lane).detach().view(-1).to(carried) for h in range(links.num_hosts)]
            wide[lane] = torch.cat(pieces)
        total = torch.empty_like(wide[hosts.local])
        links.local.reduce_scatter(total, wide, partial, False)
        result = output.new_empty(0)
        if hosts.lane is not None and links.lane is not None:
            lengths = [part(h, hosts.lane).numel() for h in range(links.num_hosts)]
            own = lengths[hosts.here]
            taken = [torch.empty(own, dtype=carried) for _ in lengths]
            links.wait(links.lane.all_to_all(taken, list(total.split(lengths)), True), "reduce")
            result = torch.empty(own, dtype=output.dtype)
            if own:
                reduce_in_order(taken, partial, taken[0])
                _land(taken[0], result, op, hosts.size)
        if first:
            self._hand_over(output, result, first)
        elif hosts.lane is not None:
            output.detach().view(-1).copy_(result)

    def _hand_over(self, output: torch.Tensor, result: torch.Tensor, first: int) -> None:
        """Bring lane j's `result` to the `output` of the rank with local number first + j."""
        links, hosts = self._links, self._links.hosts
        num_here, num_lanes = len(hosts.mine), hosts.num_lanes
        if num_here <= first:
            return
        gives, takes = [output.new_empty(0)] * num_here, [output.new_empty(0)] * num_here
        if hosts.lane is not None and first + hosts.lane < num_here:
            gives[first + hosts.lane] = result
        if first <= hosts.local < first + num_lanes:
            takes[hosts.local - first] = output
        links.local.all_to_all(takes, gives, False)


def _slices(chunk: torch.Tensor, hosts: Hosts) -> list[torch.Tensor]:
    """Cut a chunk into a slice for each rank of this host; empty ones for those in no lane."""
    step = -(-chunk.numel() // hosts.num_lanes)
    slices = [chunk[j * step : (j + 1) * step] for j in range(hosts.num_lanes)]
    return slices + [chunk[:0]] * (len(hosts.mine) - hosts.num_lanes)


def _advance(pending: deque[Steps]) -> None:
    """Do the next step of every pending chunk, the oldest first; drop those that are done."""
    for steps in list(pending):
        if next(steps, pending) is pending:
            pending.remove(steps)
