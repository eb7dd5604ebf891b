"""The collectives of a hybrid group: headers, then shared memory inside hosts and rails between.

Every collective begins with the header exchange (header.py). *Small* ones are over with it: every
rank has the data of all. For the *large* ones, all ranks call the same and lengths agree from then
on.

**Moves.** Each byte crosses to each host once.

* broadcast: through the root's host in shared memory; rail j takes slice j to the other hosts,
  which put the slices together in shared memory. In chunks, so that the three overlap.
* all_gather: inside the hosts; then rail j exchanges the tensors of the ranks with local number j,
  j + L, ..., and shows each to its host.
* gather, scatter: one in shared memory, and messages between the root and ranks of other hosts.
* all_to_all: one in shared memory, and one of the engine's for what goes to other hosts.

**Reductions.** The ranks of a host are folded in the order of ranks, then the hosts' partial
results in the order of hosts. 16 and 8 bit floats are float32 until the end (their *wire dtype*),
between hosts too, and are rounded once. That is the same on all ranks, and in
every run; on ranks that are numbered host by host it differs from the order of one host only in
where the brackets are.

An all_reduce or a reduce goes through in *chunks*, each cut into one *slice* a rail:

1. shared memory: reduce-scatter, slice j of this host's partial result to the rank of rail j;
2. rail j: reduce slice j over the hosts, in one operation of the engine where the order of hosts
   cannot matter (two hosts, integers, minima), else by all_to_all, a fold, and all_gather;
3. shared memory: all-gather the slices into the tensors.

Chunks overlap: while the network has one, step 1 of the next and step 3 of the one before run.
Every rank of a host does the same steps in the same order, in a rail or not.

A reduce_scatter is the same in one piece, with an all_to_all on the rails: rail j sees to the parts
of the ranks with local number j, j + L, ..., and hands them over where a host has more than L. What
the other hosts get is folded first, and travels while this host's own is folded.

Cost:
    Between hosts each rail sends 2 (H-1)/H of its slices, so a host sends 2 (H-1)/H S in all, where
    plain Gloo sends that for every rank; a reduce sends S from each host to the root's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from dure.comm.backends.header import Header
from dure.comm.backends.hybrid.header import HeaderExchange
from dure.comm.backends.hybrid.subcomms import COLLECTIVE_TAG, Hosts, SubComms
from dure.comm.backends.request import Request
from dure.comm.call import Call
from dure.comm.ops import ReduceOp
from dure.comm.reduction import accumulator_dtype, divide, reduce_in_order

__all__ = ["Collectives"]

_CHUNK_BYTES = 4 << 20
REDUCED_CHUNK_BYTES = 8 << 20
"""Of a chunk, all slices together; see docs/decisions/0009-hosts.md."""
_DEPTH = 3

Steps = Iterator[None]
_ROUNDED = ("SUM", "AVG", "PRODUCT")


class Collectives:
    """The collectives of one group. Threads: one at a time.

    Args:
        comms: The group's sub-communicators.
        headers: How they begin.
    """

    def __init__(self, comms: SubComms, headers: HeaderExchange) -> None:
        self._comms, self._hosts, self._headers = comms, comms.hosts, headers
        self._scratch: dict[int, torch.Tensor] = {}

    def run(self, call: Call, header: Header) -> None:
        """Run a collective; `header` is that of `call`."""
        self._headers.next(call.op, header)
        getattr(self, f"_{call.kind}")(call)

    def _fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether an operation is small."""
        return sum(t.nbytes for t in tensors) <= self._headers.room

    def _barrier(self, call: Call) -> None:
        self._headers.run()

    _new_group = _host_shared_empty = _barrier

    # ---- moves -----------------------------------------------------------------------------------

    def _broadcast(self, call: Call) -> None:
        (tensor,), root = call.outputs, call.root
        if not self._fits([tensor]):
            self._headers.run()
            self._broadcast_large(tensor, root)
            return
        here = self._hosts.rank == root
        headers = self._headers.run([tensor] if here else None)
        if not here:
            _fill(tensor, headers[root].data)

    def _broadcast_large(self, tensor: torch.Tensor, root: int) -> None:
        comms, hosts = self._comms, self._hosts
        source, at = hosts.places[root]
        pending: deque[tuple[Request | None, list[torch.Tensor]]] = deque()
        for chunk in tensor.detach().reshape(-1).view(torch.uint8).split(_CHUNK_BYTES):
            slices = _slices(chunk, hosts)
            if source == hosts.here:
                comms.local.run(_broadcast(chunk, at), False)
            request = None
            if comms.rail is not None and slices[hosts.local].numel():
                request = comms.rail.run(_broadcast(slices[hosts.local], source), True)
            pending.append((request, slices))
            if len(pending) == 2:
                self._join_slices(*pending.popleft(), source)
        for request, slices in pending:
            self._join_slices(request, slices, source)

    def _join_slices(
        self, request: Request | None, slices: list[torch.Tensor], source: int
    ) -> None:
        self._comms.wait(request, "broadcast")
        if source != self._hosts.here:
            self._comms.local.run(_all_gather(slices, slices[self._hosts.local]), False)

    def _all_gather(self, call: Call) -> None:
        (tensor,), outputs = call.inputs, call.takes(self._hosts.size)
        if not self._fits([max(outputs, key=lambda t: t.nbytes)]):
            self._headers.run()
            self._all_gather_large(outputs, tensor)
            return
        headers = self._headers.run([tensor])
        for output, other in zip(outputs, headers, strict=True):
            _fill(output, other.data)

    def _all_gather_large(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        comms, hosts = self._comms, self._hosts
        comms.local.run(_all_gather([outputs[r] for r in hosts.mine], tensor), False)
        for first in range(0, max(map(len, hosts.ranks)), hosts.num_rails):
            if comms.rail is not None:
                at = first + hosts.local
                parts = [
                    outputs[ranks[at]] if at < len(ranks) else tensor.new_empty(0)
                    for ranks in hosts.ranks
                ]
                request = comms.rail.run(_all_gather(parts, parts[hosts.here]), True)
                comms.wait(request, "all_gather")
            for host, ranks in enumerate(hosts.ranks):
                for place, rank in enumerate(ranks[first : first + hosts.num_rails]):
                    if host != hosts.here and outputs[rank].numel():
                        comms.local.run(_broadcast(outputs[rank], place), False)

    def _all_to_all(self, call: Call) -> None:
        gives, takes = call.gives(self._hosts.size), call.takes(self._hosts.size)
        if call.single and call.inputs[0].data_ptr() == call.outputs[0].data_ptr():
            gives = [t.clone() for t in gives]  # each is read before its place is written
        # The data of an all_to_all begin with a table of lengths; a root's operation needs none.
        lengths = [t.nbytes for t in gives] if call.kind == "all_to_all" else []
        data = [torch.tensor(lengths, dtype=torch.int32, device="cpu"), *gives]
        headers = self._headers.run(data if self._fits(data) else None)
        if any(other.data is None for other in headers):
            self._exchange_large(call, gives, takes)
            return
        before = headers[: self._hosts.rank]
        begin = sum(other.fingerprint.own for other in before) if call.kind == "scatter" else 0
        begin *= takes[0].element_size()
        for taken, other in zip(takes, headers, strict=True):
            if lengths:
                assert other.data is not None
                table = _as_tensor(other.data[: 4 * len(before)], torch.int32)
                begin = data[0].nbytes + int(table.sum())
            if taken.nbytes and other.data is not None:
                _fill(taken, other.data[begin : begin + taken.nbytes])

    _gather = _scatter = _all_to_all

    def _exchange_large(
        self, call: Call, gives: Sequence[torch.Tensor], takes: Sequence[torch.Tensor]
    ) -> None:
        comms, mine, size = self._comms, self._hosts.mine, self._hosts.size
        far = [r for r in range(size) if r not in mine]
        requests: list[Request | None] = []
        if call.kind == "all_to_all":
            nothing = gives[0].new_empty(0)
            sent = [gives[r] if r in far else nothing for r in range(size)]
            taken = [takes[r] if r in far else nothing for r in range(size)]
            requests.append(comms.mesh.run(_all_to_all(taken, sent), True))
        else:  # a root's: the others have nothing for each other
            tag = COLLECTIVE_TAG
            requests += [comms.mesh.recv(takes[r], r, tag, True) for r in far if takes[r].nbytes]
            requests += [comms.mesh.send(gives[r], r, tag, True) for r in far if gives[r].nbytes]
        if call.root in (-1, *mine):
            here = _all_to_all([takes[r] for r in mine], [gives[r] for r in mine])
            comms.local.run(here, False)
        for request in requests:
            comms.wait(request, call.op)

    # ---- reductions ------------------------------------------------------------------------------

    def _all_reduce(self, call: Call) -> None:
        if not self._reduce_small(call, call.inputs):
            self._reduce_chunks(call)

    _reduce = _all_reduce

    def _reduce_small(self, call: Call, inputs: Sequence[torch.Tensor]) -> bool:
        """Reduce what fits into headers; if it does not, begin to exchange them."""
        if not self._fits(inputs):
            self._headers.begin()
            return False
        headers, (output,) = self._headers.run(inputs), call.outputs
        if call.root in (-1, self._hosts.rank):
            scattered = call.kind == "reduce_scatter"
            begin = sum(t.numel() for t in inputs[: self._hosts.rank]) if scattered else 0
            parts = [_as_tensor(other.data, output.dtype) for other in headers]
            parts = [part[begin : begin + output.numel()] for part in parts]
            _fold_by_host(self._hosts, parts, call.needed_reduction, output)
        return True

    def _reduce_chunks(self, call: Call) -> None:
        flat = call.outputs[0].detach().view(-1)
        wire = accumulator_dtype(flat.dtype)
        length = max(1, REDUCED_CHUNK_BYTES // wire.itemsize)
        pending: deque[Steps] = deque()
        for number, chunk in enumerate(flat.split(length)):
            steps = self._reduce_chunk(call, chunk, number)
            next(steps)
            _advance(pending)
            pending.append(steps)
        while pending:
            _advance(pending)

    def _reduce_chunk(self, call: Call, chunk: torch.Tensor, number: int) -> Steps:
        """Do the three steps for one chunk; yields while the network is at work."""
        comms, hosts, op = self._comms, self._hosts, call.needed_reduction
        wire = accumulator_dtype(chunk.dtype)
        slices = _slices(chunk, hosts)
        mine = slices[hosts.local]
        total = self._take_scratch(number, mine.numel(), wire)
        wide = [s if s.dtype is wire else s.to(wire) for s in slices]
        comms.local.run(_reduce_scatter(total, wide, _partial(op)), False)
        self._headers.settle()
        root_host, root_place = (None, 0) if call.root < 0 else hosts.places[call.root]
        yield from self._reduce_on_rail(total, op, root_host)
        if root_host not in (None, hosts.here):
            return
        if hosts.rail is not None:
            out = total if wire is chunk.dtype else torch.empty_like(mine)
            _copy_back(total, out, op, hosts.size)
            total = out
        else:
            total = mine
        if root_host is None:
            comms.local.run(_all_gather(slices, total), False)
        else:
            taken = slices if hosts.rank == call.root else ()
            comms.local.run(_gather(taken, total, root_place), False)

    def _reduce_on_rail(self, total: torch.Tensor, op: ReduceOp, root: int | None) -> Steps:
        """Reduce a slice over the hosts, to host `root` or to all; yields once or twice.

        All ranks of a host must yield equally often, because their other steps happen between.
        """
        comms, partial, num = self._comms, _partial(op), len(self._hosts.ranks)
        rail = comms.rail if total.numel() else None
        request = None
        if num == 2 or not _order_matters(total.dtype, op):
            if rail is not None:
                name, both = "all_reduce" if root is None else "reduce", (total,)
                dst = -1 if root is None else root
                step = Call(op=name, inputs=both, outputs=both, reduction=partial, root=dst)
                request = rail.run(step, True)
            yield
            comms.wait(request, "all_reduce")
            return
        rows = -(-total.numel() // num)
        padded, taken = total.new_zeros(num * rows), total.new_empty(num * rows)
        if rail is not None:
            padded[: total.numel()] = total
            request = rail.run(
                Call(op="all_to_all_single", inputs=(padded,), outputs=(taken,)), True
            )
        yield
        comms.wait(request, "all_reduce")
        if rail is not None:
            row = total.new_empty(rows)
            reduce_in_order(list(taken.view(num, rows)), partial, row)
            if root is None:
                request = rail.run(
                    Call(op="all_gather_single", inputs=(row,), outputs=(padded,)), True
                )
            else:
                out = list(padded.view(num, rows)) if root == self._hosts.here else ()
                request = rail.run(_gather(out, row, root), True)
        yield
        comms.wait(request, "all_reduce")
        total.copy_(padded[: total.numel()])

    def _take_scratch(self, number: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a slice; chunks that overlap have their own."""
        nbytes = length * dtype.itemsize
        key = number % _DEPTH
        have = self._scratch.get(key)
        if have is None or have.numel() < nbytes:
            have = self._scratch[key] = torch.empty(
                max(nbytes, 4096), dtype=torch.uint8, device="cpu"
            )
        return have[:nbytes].view(dtype)

    def _reduce_scatter(self, call: Call) -> None:
        comms, hosts, op = self._comms, self._hosts, call.needed_reduction
        (output,), inputs = call.outputs, call.gives(hosts.size)
        if self._reduce_small(call, inputs):
            return
        wire, partial, rails = accumulator_dtype(output.dtype), _partial(op), hosts.num_rails
        parts = [t.detach().view(-1).to(wire) for t in inputs]

        def fold(host: int) -> torch.Tensor:
            """Fold what this host's ranks have for the ranks of `host`."""
            ranks = hosts.ranks[host]
            wide = [_joined([parts[r] for r in ranks[rail::rails]]) for rail in range(rails)]
            wide += [parts[0][:0]] * (len(hosts.mine) - rails)
            total = torch.empty_like(wide[hosts.local])
            comms.local.run(_reduce_scatter(total, wide, partial), False)
            return total

        here, nothing, request = hosts.here, parts[0][:0], None
        gives = [nothing if host == here else fold(host) for host in range(len(hosts.ranks))]
        self._headers.settle()
        mine = hosts.mine[hosts.local :: rails] if comms.rail is not None else ()
        lengths = [parts[r].numel() for r in mine]
        takes = [parts[0].new_empty(sum(lengths)) for _ in gives]
        if comms.rail is not None:
            takes[here] = nothing
            request = comms.rail.run(_all_to_all(takes, gives), True)
        sums = [fold(here) if host == here else taken for host, taken in enumerate(takes)]
        comms.wait(request, call.op)
        if sum(lengths):
            reduce_in_order(sums, partial, sums[0])
        if len(hosts.mine) == rails:
            _copy_back(sums[0], output, op, hosts.size)
            return
        result = torch.empty(sum(lengths), dtype=output.dtype, device="cpu")
        _copy_back(sums[0], result, op, hosts.size)
        gives, takes = [result[:0]] * len(hosts.mine), [result[:0]] * len(hosts.mine)
        for rank, part in zip(mine, result.split(lengths), strict=True):
            gives[hosts.mine.index(rank)] = part
        takes[hosts.local % rails] = output
        comms.local.run(_all_to_all(takes, gives), False)


# ---- steps ---------------------------------------------------------------------------------------


def _broadcast(tensor: torch.Tensor, src: int) -> Call:
    return Call(op="broadcast", inputs=(tensor,), outputs=(tensor,), root=src)


def _all_gather(outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Call:
    return Call(op="all_gather", inputs=(tensor,), outputs=outputs)


def _gather(outputs: Sequence[torch.Tensor], tensor: torch.Tensor, dst: int) -> Call:
    return Call(op="gather", inputs=(tensor,), outputs=outputs, root=dst)


def _reduce_scatter(output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp) -> Call:
    return Call(op="reduce_scatter", inputs=inputs, outputs=(output,), reduction=op)


def _all_to_all(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Call:
    return Call(op="all_to_all", inputs=inputs, outputs=outputs)


def _as_tensor(data: bytes | None, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes that travelled with a header as a flat tensor of its own."""
    assert data is not None
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


def _fill(tensor: torch.Tensor, data: bytes | None) -> None:
    """Write bytes that travelled with a header into a tensor."""
    flat = tensor.detach().view(-1)
    if flat.numel():
        flat.copy_(_as_tensor(data, flat.dtype))


def _order_matters(dtype: torch.dtype, op: ReduceOp) -> bool:
    return op.name in _ROUNDED and (dtype.is_floating_point or dtype.is_complex)


def _partial(op: ReduceOp) -> ReduceOp:
    """Return what partial results are folded with."""
    return ReduceOp.SUM if op.name == "AVG" else op


def _fold_by_host(
    hosts: Hosts, parts: Sequence[torch.Tensor], op: ReduceOp, out: torch.Tensor
) -> None:
    """Reduce the ranks' `parts` into `out`, in the order that the module's text defines."""
    wire, partial = accumulator_dtype(out.dtype), _partial(op)
    sums: list[torch.Tensor] = []
    for ranks in hosts.ranks:
        total = torch.empty(out.numel(), dtype=wire, device="cpu")
        reduce_in_order([parts[r].to(wire) for r in ranks], partial, total)
        sums.append(total)
    reduce_in_order(sums, partial, sums[0])
    _copy_back(sums[0], out, op, hosts.size)


def _copy_back(total: torch.Tensor, out: torch.Tensor, op: ReduceOp, size: int) -> None:
    flat = out.detach().view(-1)
    if op.name == "AVG":
        divide(total, size, flat)
    elif flat.data_ptr() != total.data_ptr():
        flat.copy_(total)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return flat tensors as one: the tensor itself where there is one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


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
