"""The MPI backend: our collectives, carried by the messages of any MPI that mpi4py finds.

MPI's own reductions know no bfloat16 and fold the ranks in an order of their own, and its
collectives can neither be interrupted nor given up on. So MPI is used for what it is best at,
getting bytes from rank to rank over whatever the machine has: each collective is a few *exchanges*,
in which every rank sends and receives at most one message to and from every other, and the
reductions are those of the native engine (see `reduction` for their order).

With S bytes a rank, n ranks, and one exchange of frames (see `mpi.frames`) before all:

| operation           | exchanges                                          | bytes a rank sends   |
|---------------------|----------------------------------------------------|----------------------|
| all_reduce          | few bytes: everything to everyone                  | (n-1) S              |
|                     | else, a segment at a time: *slice* i to rank i,    | 2 S (n-1)/n          |
|                     | which reduces it; the result to everyone           |                      |
| reduce              | the same, but the results go to `dst` alone        | S                    |
| reduce_scatter      | part i to rank i, which reduces it                 | S (n-1)/n            |
| broadcast           | few bytes: root to everyone                        | root: (n-1) S        |
|                     | else slice i to rank i, then slices to everyone    | about S              |
| all_gather          | everything to everyone                             | (n-1) S              |
| gather, scatter,    | each part to where it belongs                      | the parts            |
| all_to_all          |                                                    |                      |

Segments bound the memory for what arrives before it is reduced: (n-1) `_SEGMENT` bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from dure.comm.backends.base import BackendOptions, Ticket
from dure.comm.backends.mpi.frames import INLINE, Call, Frames, Stage
from dure.comm.backends.mpi.lane import Lane
from dure.comm.backends.mpi.library import Library
from dure.comm.backends.mpi.memory import (
    NOTHING,
    Piece,
    copy_piece,
    cut,
    messages,
    piece_of,
    reduce_pieces,
    shares,
    staging,
)
from dure.comm.backends.mpi.operation import Operation, Steps
from dure.comm.backends.mpi.verdicts import Retired, free_retired
from dure.comm.ops import ReduceOp
from dure.errors import Desync, UsageError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiBackend"]

_FEW = 32 << 10
"""Bytes up to which all_reduce and broadcast take one exchange: see docs/log.md."""

_SEGMENT = 1 << 20
"""Bytes of a slice that travel before the next are sent: they are reduced while in the cache."""

_RESERVED_TAGS = 3


class MpiBackend:
    """One rank's part of a group over MPI; the contract is that of `Backend`.

    Threads: as the contract says; see `mpi.lane`.
    """

    name = "mpi"
    device_types = frozenset({"cpu"})

    def __init__(
        self, library: Library, comm: MPI.Intracomm, options: BackendOptions, crowded: bool
    ) -> None:
        self._library, self._comm, self._mpi = library, comm, library.MPI
        self._rank, self._size = options.rank, options.size
        self._nothing = [NOTHING] * options.size
        self._peers = [r for r in range(options.size) if r != options.rank]
        highest = library.highest_tag(comm)
        self._verdict_tag, self._data_tag = highest, highest - 1
        self.num_tags = highest - _RESERVED_TAGS + 1
        """A message's tag must be less."""
        self._frames = Frames(self._mpi, comm, highest - 2)
        seconds = options.timeout.total_seconds()
        self._lane = Lane(library, comm, options.name, seconds, self._verdict_tag, crowded)

    @property
    def timeout(self) -> timedelta:
        """How long an operation may wait for its peers."""
        return timedelta(seconds=self._lane.timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may wait for its peers."""
        self._lane.timeout_s = timeout.total_seconds()

    # Exchanges ----------------------------------------------------------------------------------

    def _exchange(self, gives: Sequence[Piece], takes: Sequence[Piece], least: int = 0) -> Stage:
        """Send `gives[r]` to every rank r and receive `takes[r]`, where longer than `least`."""
        memory, comm, tag = self._mpi.memory.fromaddress, self._comm, self._data_tag
        taken = [(r, part) for r in self._peers for part in messages(takes[r], least)]
        given = [(r, part) for r in self._peers for part in messages(gives[r], least)]
        requests = [comm.Irecv(memory(*part), r, tag) for r, part in taken]
        requests += [comm.Isend(memory(*part), r, tag) for r, part in given]
        return Stage(requests, [r for r, _ in taken] + [r for r, _ in given], len(taken))

    def _open(
        self, call: Call, gives: Sequence[Piece] | None = None, takes: Sequence[Piece] | None = None
    ) -> Steps:
        """Exchange frames, then what they say; few bytes come with the frames themselves."""
        head, nothing = self._lane.head, self._nothing
        yield self._frames.start(call, head.seq or 0, head.site, gives or nothing)
        self._frames.check(takes or nothing)
        if gives is None or takes is None:
            return
        self._frames.land(takes)
        if any(gives[r][1] > INLINE or takes[r][1] > INLINE for r in self._peers):
            self._lane.look(head)
            yield self._exchange(gives, takes, INLINE)
        copy_piece(self._mpi, gives[self._rank], takes[self._rank])

    def _run(self, name: str, steps: Steps, async_op: bool) -> Ticket | None:
        return self._lane.collective(Operation(self._lane, name, steps), async_op)

    # Reductions ---------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Ticket | None:
        """See `Backend.all_reduce`."""
        few = tensor.nbytes <= _FEW
        steps = self._all_reduce_few(tensor, op) if few else self._all_reduce_many(tensor, op)
        return self._run("all_reduce", steps, async_op)

    def _all_reduce_few(self, tensor: torch.Tensor, op: ReduceOp) -> Steps:
        call = Call("all_reduce", tensor.dtype, op, numel=tensor.numel())
        here, nbytes = tensor.data_ptr(), tensor.nbytes
        room = None
        if nbytes <= INLINE:
            places = [self._frames.inline_address(r) for r in range(self._size)]
            takes = [(place, nbytes) for place in places]
        else:
            room, takes = staging(nbytes, self._size)
        takes[self._rank] = (here, nbytes)
        yield from self._open(call, [(here, nbytes)] * self._size, takes)
        reduce_pieces(self._mpi, takes, tensor.dtype, op, (here, nbytes))
        del room

    def _all_reduce_many(self, tensor: torch.Tensor, op: ReduceOp) -> Steps:
        yield from self._open(Call("all_reduce", tensor.dtype, op, numel=tensor.numel()))
        for slices in self._segments(tensor):
            mine = slices[self._rank]
            yield from self._reduce_slices(slices, mine, tensor.dtype, op)
            yield self._exchange([mine] * self._size, slices)

    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp, async_op: bool) -> Ticket | None:
        """See `Backend.reduce`."""
        return self._run("reduce", self._reduce(tensor, dst, op), async_op)

    def _reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp) -> Steps:
        yield from self._open(Call("reduce", tensor.dtype, op, dst, tensor.numel()))
        nothing, here = self._nothing, self._rank == dst
        for slices in self._segments(tensor):
            mine = slices[self._rank]
            result = torch.empty(0 if here else mine[1], dtype=torch.uint8)
            out = mine if here else (result.data_ptr(), mine[1])
            yield from self._reduce_slices(slices, out, tensor.dtype, op)
            gives = [out if r == dst else NOTHING for r in range(self._size)]
            yield self._exchange(nothing if here else gives, slices if here else nothing)

    def reduce_scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, async_op: bool
    ) -> Ticket | None:
        """See `Backend.reduce_scatter`."""
        parts = [piece_of(t) for t in inputs]
        steps = self._reduce_scatter(tensor, parts, op, (tensor, inputs))
        return self._run("reduce_scatter", steps, async_op)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, async_op: bool
    ) -> Ticket | None:
        """See `Backend.reduce_scatter_single`."""
        parts = shares(piece_of(tensor), self._size)
        steps = self._reduce_scatter(output, parts, op, tensor)
        return self._run("reduce_scatter_single", steps, async_op)

    def _reduce_scatter(
        self, output: torch.Tensor, parts: list[Piece], op: ReduceOp, owners: object
    ) -> Steps:
        lengths = tuple(nbytes for _, nbytes in parts)
        count = sum(lengths) // output.element_size()
        yield from self._open(
            Call("reduce_scatter", output.dtype, op, numel=count, lengths=lengths)
        )
        out = piece_of(output)
        for begin in range(0, max(lengths), _SEGMENT):
            slices = [cut(part, begin, _SEGMENT) for part in parts]
            yield from self._reduce_slices(slices, cut(out, begin, _SEGMENT), output.dtype, op)
        del owners

    def _reduce_slices(
        self, slices: Sequence[Piece], out: Piece, dtype: torch.dtype, op: ReduceOp
    ) -> Steps:
        """Reduce slice i of all ranks on rank i; this rank's result goes to `out`."""
        room, takes = staging(slices[self._rank][1], self._size)
        takes[self._rank] = slices[self._rank]
        yield self._exchange(slices, takes)
        reduce_pieces(self._mpi, takes, dtype, op, out)
        del room

    def _segments(self, tensor: torch.Tensor) -> Iterator[list[Piece]]:
        """Cut a tensor into segments, and each of these into one slice for each rank."""
        width, whole = tensor.element_size(), piece_of(tensor)
        longest = _SEGMENT // width * width * self._size
        for begin in range(0, whole[1], longest):
            yield shares(cut(whole, begin, longest), self._size, width)

    # Movements ----------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool) -> Ticket | None:
        """See `Backend.broadcast`."""
        few = tensor.nbytes <= _FEW or self._size == 2
        steps = self._broadcast_few(tensor, src) if few else self._broadcast_many(tensor, src)
        return self._run("broadcast", steps, async_op)

    def _broadcast_few(self, tensor: torch.Tensor, src: int) -> Steps:
        call = Call("broadcast", tensor.dtype, root=src, numel=tensor.numel())
        gives, takes = self._nothing[:], self._nothing[:]
        if self._rank == src:
            gives = [piece_of(tensor)] * self._size
        else:
            takes[src] = piece_of(tensor)
        yield from self._open(call, gives, takes)

    def _broadcast_many(self, tensor: torch.Tensor, src: int) -> Steps:
        yield from self._open(Call("broadcast", tensor.dtype, root=src, numel=tensor.numel()))
        count, nothing = self._size, self._nothing
        slices = shares(piece_of(tensor), count)
        mine = slices[self._rank]
        if self._rank == src:
            yield self._exchange(slices, nothing)
            yield self._exchange([mine] * count, nothing)
            return
        yield self._exchange(nothing, [mine if r == src else NOTHING for r in range(count)])
        gives = [NOTHING if r == src else mine for r in range(count)]
        yield self._exchange(gives, slices)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_gather`."""
        lengths = tuple(t.numel() for t in outputs)
        call = Call("all_gather", tensor.dtype, lengths=lengths)
        gives = [piece_of(tensor)] * self._size
        return self._move(call, gives, [piece_of(t) for t in outputs], (tensor, outputs), async_op)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_gather_single`."""
        call = Call("all_gather", tensor.dtype, numel=output.numel())
        gives, takes = [piece_of(tensor)] * self._size, shares(piece_of(output), self._size)
        return self._move(call, gives, takes, (tensor, output), async_op)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        dst: int,
        async_op: bool,
    ) -> Ticket | None:
        """See `Backend.gather`."""
        gives, takes = self._nothing[:], self._nothing[:]
        gives[dst] = piece_of(tensor)
        if outputs is not None:
            takes = [piece_of(t) for t in outputs]
        call = Call("gather", tensor.dtype, root=dst)
        return self._move(call, gives, takes, (tensor, outputs), async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        src: int,
        async_op: bool,
    ) -> Ticket | None:
        """See `Backend.scatter`."""
        gives, takes = self._nothing[:], self._nothing[:]
        takes[src] = piece_of(tensor)
        if inputs is not None:
            gives = [piece_of(t) for t in inputs]
        call = Call("scatter", tensor.dtype, root=src)
        return self._move(call, gives, takes, (tensor, inputs), async_op)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_to_all`."""
        call = Call("all_to_all", inputs[0].dtype)
        gives, takes = [piece_of(t) for t in inputs], [piece_of(t) for t in outputs]
        return self._move(call, gives, takes, (inputs, outputs), async_op)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_to_all_single`."""
        call = Call("all_to_all", tensor.dtype)
        source = tensor.clone() if tensor.data_ptr() == output.data_ptr() else tensor
        gives, takes = shares(piece_of(source), self._size), shares(piece_of(output), self._size)
        return self._move(call, gives, takes, (source, output), async_op)

    def barrier(self, async_op: bool) -> Ticket | None:
        """See `Backend.barrier`."""
        return self._run("barrier", self._open(Call("barrier")), async_op)

    def _move(
        self, call: Call, gives: list[Piece], takes: list[Piece], owners: object, async_op: bool
    ) -> Ticket | None:
        """Run a collective that is one exchange; `owners` keep the memory alive."""

        def steps() -> Steps:
            yield from self._open(call, gives, takes)
            nonlocal owners
            owners = None

        return self._run(call.op, steps(), async_op)

    # Messages -----------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Ticket | None:
        """See `Backend.send`."""
        self._check_tag(tag)
        steps = self._send(tensor, dst, tag)
        ticket = self._lane.message(Operation(self._lane, "send", steps, dst), async_op)
        return ticket if async_op else None

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        memory = self._mpi.memory.fromaddress
        parts = messages(piece_of(tensor), -1)
        requests = [self._comm.Isend(memory(*part), dst, tag) for part in parts]
        yield Stage(requests, [dst] * len(requests))

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Ticket:
        """See `Backend.recv`."""
        self._check_tag(tag)
        operation = Operation(self._lane, "recv", None, src)
        operation.steps = self._recv(operation, tensor, src, tag)
        return self._lane.message(operation, async_op)

    def _recv(self, operation: Operation, tensor: torch.Tensor, src: int | None, tag: int) -> Steps:
        """Receive; of a long message, the parts after the first come from where that came from."""
        memory, status = self._mpi.memory.fromaddress, self._mpi.Status()
        source = self._mpi.ANY_SOURCE if src is None else src
        for address, nbytes in messages(piece_of(tensor), -1):
            request = self._comm.Irecv(memory(address, nbytes), source, tag)
            yield Stage([request], [-1 if src is None else src], 1, [status])
            operation.source = source = status.Get_source()
            got = status.Get_count(self._mpi.BYTE)
            if got != nbytes:
                raise Desync(
                    "a message does not fit the tensor it is received into",
                    peer=source,
                    seen=f"{got} bytes came for a tensor of {nbytes}",
                )

    def _check_tag(self, tag: int) -> None:
        if tag >= self.num_tags:
            raise UsageError(
                f"over this MPI a tag must be less than {self.num_tags}", seen=f"tag={tag}"
            )

    # The rest -----------------------------------------------------------------------------------

    def shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """See `Backend.shared_empty`: the ranks share no memory."""
        del nbytes
        return None

    def host_shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """See `Backend.host_shared_empty`: there is none."""
        del nbytes
        return None

    def close(self, abort: bool) -> None:
        """See `Backend.close`; the communicator is freed once all peers have left as well."""
        del abort
        if not self._lane.close():
            return
        with self._library.lock:
            self._frames.close()
            still_there = self._lane.still_there()
            self._library.retired.append(Retired(self._comm, self._verdict_tag, still_there))
            free_retired(self._library)
