"""The large collectives of a hybrid group: shared memory inside hosts, rails between.

The headers have been exchanged by the caller (all_reduce and reduce: begun), so all ranks call the
same and lengths agree.

**Moves.** Each byte crosses to each host once.

* broadcast: through the root's host in shared memory; rail j takes slice j to the other hosts,
  which put the slices together in shared memory. In chunks, so that the three overlap.
* all_gather: inside the hosts; then rail j exchanges the tensors of the ranks with local number j,
  j + L, ..., and shows each to its host.
* gather, scatter: one in shared memory, and messages between the root and ranks of other hosts.
* all_to_all: one in shared memory, and one of the engine's for what goes to other hosts.

**Reductions.** The ranks of a host are folded in the order of ranks, then the hosts' partial
results in the order of hosts. Sums and products of 16 and 8 bit floats stay float32 until the end
(their *wire dtype*), between hosts too, and are rounded once. That is the same on all ranks, and in
every run; on ranks that are numbered host by host it differs from the order of one host only in
where the brackets are.

An all_reduce or a reduce goes through in *chunks*, each cut into one *slice* a rail:

1. shared memory: reduce-scatter, slice j of this host's partial result to the rank of rail j;
2. rail j: reduce slice j over the hosts, in one operation of the engine where the order of hosts
   cannot matter (two hosts, integers, minima), else by all_to_all, a fold, and all_gather;
3. shared memory: all-gather the slices into the tensors.

Chunks overlap: while the network has one, step 1 of the next and step 3 of the one before run.
Every rank of a host does the same steps in the same order, in a rail or not.

Cost: between hosts each rail sends 2 (H-1)/H of its slices, so a host sends 2 (H-1)/H S in all,
where plain Gloo sends that for every rank; a reduce sends S from each host to the root's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from dure.comm import call as calls
from dure.comm.backends.hybrid.subcomms import Hosts, SubComms
from dure.comm.backends.request import Request
from dure.comm.ops import ReduceOp
from dure.comm.reduction import reduce_in_order

__all__ = ["Moves", "Reductions", "fold_by_host"]

_CHUNK_BYTES = 4 << 20
REDUCED_CHUNK_BYTES = 8 << 20
"""Of a chunk, all slices together; see docs/log.md."""
_DEPTH = 3

Steps = Iterator[None]
_ROUNDED = ("SUM", "AVG", "PRODUCT")


class Moves:
    """The large moves of one group.

    Args:
        comms: The group's sub-communicators.
    """

    def __init__(self, comms: SubComms) -> None:
        self._comms = comms

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Copy `tensor` of `src` to all."""
        comms, hosts = self._comms, self._comms.hosts
        flat = _bytes(tensor)
        source, at = hosts.place_of(src)
        pending: deque[tuple[Request | None, list[torch.Tensor]]] = deque()
        for chunk in flat.split(_CHUNK_BYTES):
            step = -(-chunk.numel() // hosts.num_rails)
            slices = [chunk[j * step : (j + 1) * step] for j in range(hosts.num_rails)]
            if source == hosts.here:
                comms.local.run(calls.broadcast(chunk, at), False)
            request = None
            if comms.rail is not None and slices[hosts.local].numel():
                request = comms.rail.run(calls.broadcast(slices[hosts.local], source), True)
            pending.append((request, slices))
            if len(pending) == 2:
                self._join_slices(*pending.popleft(), source)
        for request, slices in pending:
            self._join_slices(request, slices, source)

    def _join_slices(
        self, request: Request | None, slices: list[torch.Tensor], source: int
    ) -> None:
        comms, hosts = self._comms, self._comms.hosts
        comms.wait(request, "broadcast")
        if source != hosts.here:
            slices = slices + [slices[0][:0]] * (len(hosts.mine) - hosts.num_rails)
            comms.local.run(calls.all_gather(slices, slices[hosts.local]), False)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Copy rank r's `tensor` to `outputs[r]` on all ranks."""
        comms, hosts = self._comms, self._comms.hosts
        comms.local.run(calls.all_gather([outputs[r] for r in hosts.mine], tensor), False)
        for first in range(0, max(map(len, hosts.ranks)), hosts.num_rails):
            if comms.rail is not None:
                at = first + hosts.local
                parts = [
                    outputs[ranks[at]] if at < len(ranks) else tensor.new_empty(0)
                    for ranks in hosts.ranks
                ]
                comms.wait(
                    comms.rail.run(calls.all_gather(parts, parts[hosts.here]), True), "all_gather"
                )
            for host, ranks in enumerate(hosts.ranks):
                for place, rank in enumerate(ranks[first : first + hosts.num_rails]):
                    if host != hosts.here and outputs[rank].numel():
                        comms.local.run(calls.broadcast(outputs[rank], place), False)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        dst: int,
        waiting: Sequence[int],
    ) -> None:
        """Copy the `tensor` of the ranks `waiting` to `outputs` on `dst`."""
        comms, hosts, nothing = self._comms, self._comms.hosts, tensor.new_empty(0)
        source, at = hosts.place_of(dst)
        if source != hosts.here:
            if hosts.rank in waiting:
                request = comms.mesh.send(tensor, dst, comms.mesh_tags[0], True)
                comms.wait(request, "gather")
            return
        requests: list[Request] = []
        here = [nothing] * len(hosts.mine)
        for peer in waiting if outputs is not None else ():
            assert outputs is not None
            host, place = hosts.place_of(peer)
            if host == hosts.here:
                here[place] = outputs[peer]
            else:
                requests.append(comms.mesh.recv(outputs[peer], peer, comms.mesh_tags[0], True))
        if any(rank in waiting for rank in hosts.mine):
            mine = tensor if hosts.rank in waiting else nothing
            comms.local.run(calls.gather(None if outputs is None else here, mine, at), False)
        for request in requests:
            comms.wait(request, "gather")

    def scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int
    ) -> None:
        """Copy `inputs[r]` of `src` to rank r's `tensor`."""
        comms, hosts = self._comms, self._comms.hosts
        source, at = hosts.place_of(src)
        if source != hosts.here:
            if tensor.numel():
                comms.wait(comms.mesh.recv(tensor, src, comms.mesh_tags[0], True), "scatter")
            return
        far = [] if inputs is None else [r for r in range(hosts.size) if r not in hosts.mine]
        requests = [
            comms.mesh.send(part, peer, comms.mesh_tags[0], True)
            for peer, part in ((r, (inputs or ())[r]) for r in far)
            if part.numel()
        ]
        here = None if inputs is None else [inputs[r] for r in hosts.mine]
        comms.local.run(calls.scatter(tensor, here, at), False)
        for request in requests:
            comms.wait(request, "scatter")

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j."""
        comms, mine = self._comms, self._comms.hosts.mine
        nothing = inputs[0].new_empty(0)
        far = range(comms.hosts.size)
        request = comms.mesh.run(
            calls.all_to_all(
                [nothing if r in mine else outputs[r] for r in far],
                [nothing if r in mine else inputs[r] for r in far],
            ),
            True,
        )
        comms.local.run(
            calls.all_to_all([outputs[r] for r in mine], [inputs[r] for r in mine]), False
        )
        comms.wait(request, "all_to_all")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _wire_dtype(dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
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
    wire, partial = _wire_dtype(out.dtype, op), _partial(op)
    sums: list[torch.Tensor] = []
    for ranks in hosts.ranks:
        total = torch.empty(out.numel(), dtype=wire)
        reduce_in_order([parts[r].to(wire) for r in ranks], partial, total)
        sums.append(total)
    reduce_in_order(sums, partial, sums[0])
    _copy_back(sums[0], out, op, hosts.size)


def _copy_back(total: torch.Tensor, out: torch.Tensor, op: ReduceOp, size: int) -> None:
    if op.name == "AVG":
        total.div_(size)
    if out.data_ptr() != total.data_ptr():
        out.detach().view(-1).copy_(total)


class Reductions:
    """The large reductions of one group; the opening has been begun or settled by the caller.

    Args:
        comms: The group's sub-communicators.
    """

    def __init__(self, comms: SubComms) -> None:
        self._comms = comms
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
        wire = _wire_dtype(flat.dtype, op)
        length = max(1, REDUCED_CHUNK_BYTES // wire.itemsize)
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
        comms, hosts = self._comms, self._comms.hosts
        wire = _wire_dtype(chunk.dtype, op)
        slices = _slices(chunk, hosts)
        mine = slices[hosts.local]
        total = self._take_scratch(number, mine.numel(), wire)
        wide = [s if s.dtype is wire else s.to(wire) for s in slices]
        comms.local.run(calls.reduce_scatter(total, wide, _partial(op)), False)
        next(settle, None)
        root = None if dst is None else hosts.place_of(dst)
        for _ in self._across(total, op, None if root is None else root[0]):
            yield
        if root is not None and root[0] != hosts.here:
            return
        if hosts.rail is not None:
            out = total if wire is chunk.dtype else torch.empty_like(mine)
            _copy_back(total, out, op, hosts.size)
            total = out
        else:
            total = mine
        if root is None:
            comms.local.run(calls.all_gather(slices, total), False)
        else:
            comms.local.run(
                calls.gather(slices if hosts.rank == dst else None, total, root[1]), False
            )

    def _across(self, total: torch.Tensor, op: ReduceOp, root: int | None) -> Steps:
        """Reduce a slice over the hosts, to `root` or to all; yields once or twice on every rank.

        All ranks of a host must yield equally often, because their other steps happen between.
        """
        comms, partial = self._comms, _partial(op)
        rail = comms.rail if total.numel() else None
        if comms.num_hosts == 2 or not _order_matters(total.dtype, op):
            request = None
            if rail is not None and root is None:
                request = rail.run(calls.all_reduce(total, partial), True)
            elif rail is not None and root is not None:
                request = rail.run(calls.reduce(total, root, partial), True)
            yield
            comms.wait(request, "all_reduce")
            return
        num, request = comms.num_hosts, None
        rows = -(-total.numel() // num)
        padded, taken = total.new_zeros(num * rows), total.new_empty(num * rows)
        if rail is not None:
            padded[: total.numel()] = total
            request = rail.run(calls.all_to_all_single(taken, padded), True)
        yield
        comms.wait(request, "all_reduce")
        if rail is not None:
            row = total.new_empty(rows)
            reduce_in_order(list(taken.view(num, rows)), partial, row)
            if root is None:
                request = rail.run(calls.all_gather_single(padded, row), True)
            else:
                out = list(padded.view(num, rows)) if root == comms.here else None
                request = rail.run(calls.gather(out, row, root), True)
        yield
        comms.wait(request, "all_reduce")
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

        In rounds: in round k rail j sees to the rank with local number j + k L of every host, so
        that every part crosses the network once for each other host.
        """
        hosts, num_rails = self._comms.hosts, self._comms.hosts.num_rails
        for first in range(0, max(map(len, hosts.ranks)), num_rails):
            self._round(output, inputs, op, first)

    def _round(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, first: int
    ) -> None:
        comms, hosts = self._comms, self._comms.hosts
        wire, partial = _wire_dtype(output.dtype, op), _partial(op)
        nothing = torch.empty(0, dtype=wire)

        def part(host: int, rail: int) -> torch.Tensor:
            ranks = hosts.ranks[host]
            return inputs[ranks[first + rail]] if first + rail < len(ranks) else nothing

        wide = [nothing] * len(hosts.mine)
        for rail in range(hosts.num_rails):
            pieces = [part(h, rail).detach().view(-1).to(wire) for h in range(comms.num_hosts)]
            wide[rail] = torch.cat(pieces)
        total = torch.empty_like(wide[hosts.local])
        comms.local.run(calls.reduce_scatter(total, wide, partial), False)
        result = output.new_empty(0)
        if hosts.rail is not None and comms.rail is not None:
            lengths = [part(h, hosts.rail).numel() for h in range(comms.num_hosts)]
            own = lengths[hosts.here]
            taken = [torch.empty(own, dtype=wire) for _ in lengths]
            comms.wait(
                comms.rail.run(calls.all_to_all(taken, list(total.split(lengths))), True), "reduce"
            )
            result = torch.empty(own, dtype=output.dtype)
            if own:
                reduce_in_order(taken, partial, taken[0])
                _copy_back(taken[0], result, op, hosts.size)
        if first:
            self._hand_over(output, result, first)
        elif hosts.rail is not None:
            output.detach().view(-1).copy_(result)

    def _hand_over(self, output: torch.Tensor, result: torch.Tensor, first: int) -> None:
        """Bring rail j's `result` to the `output` of the rank with local number first + j."""
        comms, hosts = self._comms, self._comms.hosts
        num_here, num_rails = len(hosts.mine), hosts.num_rails
        if num_here <= first:
            return
        gives, takes = [output.new_empty(0)] * num_here, [output.new_empty(0)] * num_here
        if hosts.rail is not None and first + hosts.rail < num_here:
            gives[first + hosts.rail] = result
        if first <= hosts.local < first + num_rails:
            takes[hosts.local - first] = output
        comms.local.run(calls.all_to_all(takes, gives), False)


def _slices(chunk: torch.Tensor, hosts: Hosts) -> list[torch.Tensor]:
    """Cut a chunk into a slice for each rank of this host; empty ones for those in no rail."""
    step = -(-chunk.numel() // hosts.num_rails)
    slices = [chunk[j * step : (j + 1) * step] for j in range(hosts.num_rails)]
    return slices + [chunk[:0]] * (len(hosts.mine) - hosts.num_rails)


def _advance(pending: deque[Steps]) -> None:
    """Do the next step of every pending chunk, the oldest first; drop those that are done."""
    for steps in list(pending):
        if next(steps, pending) is pending:
            pending.remove(steps)
