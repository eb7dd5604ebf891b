"""The MPI backend: our collectives, carried by the messages of any MPI that mpi4py finds.

MPI's own reductions do not support bfloat16 and fold the ranks in an unspecified order, and MPI
does not notice that ranks call different things. So its collectives are used only in groups that do
not compare calls (`mpi.own`). Else MPI only sends bytes from rank to rank: each collective is a few
*exchanges*, in which every rank sends at most one message to every other, and the reductions are
those of the native engine (see `reduction` for their order).

With S bytes per rank, n ranks, and first one exchange of headers (see `mpi.header`):

| operation           | exchanges                                          | bytes sent per rank  |
|---------------------|----------------------------------------------------|----------------------|
| all_reduce          | few bytes: all data to all ranks                   | (n-1) S              |
|                     | else, a segment at a time: *slice* i to rank i,    | 2 S (n-1)/n          |
|                     | which reduces it; the result to all ranks          |                      |
| reduce              | the same, but the results to `dst` alone           | S                    |
| reduce_scatter      | part i to rank i, which reduces it                 | S (n-1)/n            |
| broadcast           | few bytes: root to all ranks                       | root: (n-1) S        |
|                     | else slice i to rank i, then slices to all ranks   | about S              |
| all_gather          | all data to all ranks                              | (n-1) S              |
| gather, scatter,    | each part to its receiver                          | the parts            |
| all_to_all          |                                                    |                      |

Segments limit the memory for data that are not reduced yet: (n-1) `_SEGMENT` bytes.
"""

from __future__ import annotations

import os
import platform
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.header import Header
from dure.comm.backends.mpi.header import INLINE, POLL, Headers, Stage
from dure.comm.backends.mpi.library import Library, load
from dure.comm.backends.mpi.matching import Unmatched
from dure.comm.backends.mpi.memory import (
    NOTHING,
    Piece,
    copy_piece,
    cut,
    message_of,
    piece_of,
    reduce_pieces,
    shares,
    staging,
)
from dure.comm.backends.mpi.own import OwnCollectives
from dure.comm.backends.mpi.progress import Operation, ProgressEngine, Steps
from dure.comm.backends.request import Request
from dure.comm.call import Call, fingerprint, place_of
from dure.comm.ops import ReduceOp
from dure.errors import Desync, UsageError
from dure.store.system import cpu_quota

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiBackend", "create_mpi"]

_FEW = 32 << 10
"""Bytes up to which all_reduce and broadcast take one exchange.

Measured: docs/decisions/0010-foreign-engines.md.
"""

_SEGMENT = 1 << 20
"""Bytes of a slice that are sent at a time, so that they are reduced while in the cache."""

_RESERVED_TAGS = 3


class MpiBackend:
    """One rank's part of a group over MPI; the contract is that of `Backend`.

    Threads:
        As the contract; see `mpi.progress`.
    """

    name = "mpi"
    device_types = frozenset({"cpu"})

    def __init__(
        self, library: Library, comm: MPI.Intracomm, options: BackendOptions, oversubscribed: bool
    ) -> None:
        self._library, self._comm, self._mpi = library, comm, library.MPI
        self._rank, self._size = options.rank, options.size
        self._nothing = [NOTHING] * options.size
        self._peers = [r for r in range(options.size) if r != options.rank]
        highest = library.highest_tag(comm)
        self._data_tag = highest - 1
        self.num_tags = highest - _RESERVED_TAGS + 1
        """A message's tag must be less."""
        self._headers = Headers(self._mpi, comm, highest - 2)
        seconds = (options.op_timeout or options.timeout).total_seconds()
        self.compares_calls = _compares(options)
        self._own = None if self.compares_calls else OwnCollectives(self._mpi, comm)
        self._engine = ProgressEngine(library, comm, options.name, seconds, highest, oversubscribed)
        self._unmatched = Unmatched()

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may wait for its peers."""
        self._engine.timeout_s = timeout.total_seconds()

    # ---- exchanges -------------------------------------------------------------------------------

    def _exchange(self, gives: Sequence[Piece], takes: Sequence[Piece], least: int = 0) -> Stage:
        """Send `gives[r]` to every rank r and receive `takes[r]`, where longer than `least`."""
        mpi, comm, tag = self._mpi, self._comm, self._data_tag
        sources = [r for r in self._peers if takes[r][1] > least]
        receivers = [r for r in self._peers if gives[r][1] > least]
        requests = [comm.Irecv(message_of(mpi, takes[r]), r, tag) for r in sources]
        requests += [comm.Isend(message_of(mpi, gives[r]), r, tag) for r in receivers]
        return Stage(requests, sources + receivers, len(sources))

    def _open(
        self, gives: Sequence[Piece] | None = None, takes: Sequence[Piece] | None = None
    ) -> Steps:
        """Exchange headers, then the pieces; few bytes are sent with the headers."""
        head, nothing = self._engine.head, self._nothing
        assert head.header is not None
        yield self._headers.start(head.header._replace(seq=head.seq or 0), gives or nothing)
        self._headers.check()
        if gives is None or takes is None:
            return
        self._headers.copy_back(takes)
        if any(gives[r][1] > INLINE or takes[r][1] > INLINE for r in self._peers):
            self._engine.look(head)
            yield self._exchange(gives, takes, INLINE)
        copy_piece(self._mpi, gives[self._rank], takes[self._rank])

    def run(self, call: Call, async_op: bool) -> Request | None:
        steps: Steps
        if self._own is not None and self._own.takes(call):
            steps = self._own_collective(self._own, call)
        else:
            steps = getattr(self, f"_{call.kind}")(call)
        header = Header(fingerprint(call, self._rank, self._size), place_of(call))
        operation = Operation(self._engine, call.op, steps, header=header)
        return self._engine.collective(operation, async_op)

    def _own_collective(self, own: OwnCollectives, call: Call) -> Steps:
        """Run a collective of MPI; this generator keeps its tensors alive."""
        yield Stage([own.start(call)], [-1])

    # ---- reductions ------------------------------------------------------------------------------

    def _all_reduce(self, call: Call) -> Steps:
        (tensor,), op = call.outputs, call.needed_reduction
        many = tensor.nbytes > _FEW
        return self._all_reduce_many(tensor, op) if many else self._all_reduce_few(tensor, op)

    def _all_reduce_few(self, tensor: torch.Tensor, op: ReduceOp) -> Steps:
        here, nbytes = tensor.data_ptr(), tensor.nbytes
        room = None
        if nbytes <= INLINE:
            places = [self._headers.inline_address(r) for r in range(self._size)]
            takes = [(place, nbytes) for place in places]
        else:
            room, takes = staging(nbytes, self._size)
        takes[self._rank] = (here, nbytes)
        yield from self._open([(here, nbytes)] * self._size, takes)
        reduce_pieces(self._mpi, takes, tensor.dtype, op, (here, nbytes))
        del room

    def _all_reduce_many(self, tensor: torch.Tensor, op: ReduceOp) -> Steps:
        yield from self._open()
        for slices in self._segments(tensor):
            mine = slices[self._rank]
            yield from self._reduce_slices(slices, mine, tensor.dtype, op)
            yield self._exchange([mine] * self._size, slices)

    def _reduce(self, call: Call) -> Steps:
        (tensor,), op, dst = call.outputs, call.needed_reduction, call.root
        yield from self._open()
        nothing, here = self._nothing, self._rank == dst
        for slices in self._segments(tensor):
            mine = slices[self._rank]
            result = torch.empty(0 if here else mine[1], dtype=torch.uint8, device="cpu")
            out = mine if here else (result.data_ptr(), mine[1])
            yield from self._reduce_slices(slices, out, tensor.dtype, op)
            gives = [out if r == dst else NOTHING for r in range(self._size)]
            yield self._exchange(nothing if here else gives, slices if here else nothing)

    def _reduce_scatter(self, call: Call) -> Steps:
        (output,), op = call.outputs, call.needed_reduction
        parts = self._pieces(call.inputs, call.single)
        yield from self._open()
        out = piece_of(output)
        for begin in range(0, max(nbytes for _, nbytes in parts), _SEGMENT):
            slices = [cut(part, begin, _SEGMENT) for part in parts]
            yield from self._reduce_slices(slices, cut(out, begin, _SEGMENT), output.dtype, op)

    def _pieces(self, tensors: Sequence[torch.Tensor], single: bool) -> list[Piece]:
        """Return the memory of one piece for each rank."""
        if single:
            return shares(piece_of(tensors[0]), self._size)
        return [piece_of(t) for t in tensors]

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
        width, memory = tensor.element_size(), piece_of(tensor)
        longest = _SEGMENT // width * width * self._size
        for begin in range(0, memory[1], longest):
            yield shares(cut(memory, begin, longest), self._size, width)

    # ---- movements -------------------------------------------------------------------------------

    def _broadcast(self, call: Call) -> Steps:
        (tensor,), src = call.outputs, call.root
        if tensor.nbytes > _FEW and self._size > 2:
            return self._broadcast_many(tensor, src)
        gives, takes = self._nothing[:], self._nothing[:]
        if self._rank == src:
            gives = [piece_of(tensor)] * self._size
        else:
            takes[src] = piece_of(tensor)
        return self._open(gives, takes)

    def _broadcast_many(self, tensor: torch.Tensor, src: int) -> Steps:
        yield from self._open()
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

    def _all_gather(self, call: Call) -> Steps:
        gives = [piece_of(call.inputs[0])] * self._size
        return self._open(gives, self._pieces(call.outputs, call.single))

    def _all_to_all(self, call: Call) -> Steps:
        sources = call.inputs
        if call.single and sources[0].data_ptr() == call.outputs[0].data_ptr():
            sources = [sources[0].clone()]
        gives, takes = (self._pieces(t, call.single) for t in (sources, call.outputs))
        yield from self._open(gives, takes)
        del sources  # a copy must live until here

    def _gather(self, call: Call) -> Steps:
        gives, takes = call.gives(self._size), call.takes(self._size)
        return self._open(self._pieces(gives, False), self._pieces(takes, False))

    _scatter = _gather

    def _barrier(self, call: Call) -> Steps:
        del call
        return self._open()

    _new_group = _barrier

    # ---- messages --------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        self._check_tag(tag)
        steps = self._send(tensor, dst, tag)
        request = self._engine.message(Operation(self._engine, "send", steps, dst), async_op)
        return request if async_op else None

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        yield Stage([self._comm.Isend(message_of(self._mpi, piece_of(tensor)), dst, tag)], [dst])

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        self._check_tag(tag)
        operation = Operation(self._engine, "recv", None, src)
        operation.steps = self._recv(operation, tensor, src, tag)
        return self._engine.message(operation, async_op)

    def _recv(self, operation: Operation, tensor: torch.Tensor, src: int | None, tag: int) -> Steps:
        """Receive a message once it has arrived; one of another length stays in MPI's queue.

        Probing and receiving are one step under `Library.lock`, so no other receive can take the
        message in between. A receive does not probe before an earlier one that the message could
        be for.
        """
        status = self._mpi.Status()
        number = self._unmatched.add(src, tag)
        try:
            while not self._unmatched.is_next(number, src, tag) or not self._comm.Iprobe(
                self._mpi.ANY_SOURCE if src is None else src, tag, status
            ):
                yield POLL
        finally:
            self._unmatched.remove(number, src, tag)
        operation.source = source = status.Get_source()
        arrived = status.Get_elements(self._mpi.BYTE)
        if arrived != tensor.nbytes:
            raise Desync(
                "a message does not match its receive",
                peer=source,
                seen=f"a message of {arrived} bytes for a tensor of {tensor.nbytes}",
                fix="Receive into a tensor of the length that is sent; the message is kept for "
                "a receive that fits.",
            )
        request = self._comm.Irecv(message_of(self._mpi, piece_of(tensor)), source, tag)
        yield Stage([request], [source], 1)

    def _check_tag(self, tag: int) -> None:
        if tag >= self.num_tags:
            raise UsageError(
                f"over this MPI a tag must be less than {self.num_tags}", seen=f"tag={tag}"
            )

    # ---- the rest --------------------------------------------------------------------------------

    def allocate(self, nbytes: int, node_shared: bool) -> torch.Tensor | None:
        """See `Backend.allocate`: the ranks share no memory."""
        del nbytes, node_shared
        return None

    def close(self, abort: bool) -> None:
        del abort
        self._engine.close()


def _compares(options: BackendOptions) -> bool:
    """Return whether calls are compared: unless ``pg_options={"verify": False}``."""
    given = options.pg_options
    return not isinstance(given, Mapping) or given.get("verify") is not False


def create_mpi(options: BackendOptions) -> MpiBackend:
    """Make the group's communicator; every rank of the group must do so.

    MPI numbers the processes that it started together; Dure's ranks may have other numbers, or be
    only some of them. So each rank publishes its MPI rank and its host in the store. From that all
    make the same communicator, and each finds whether its host has more ranks than cores.

    Raises:
        UsageError: mpi4py or MPI is missing, or the ranks were not started together by MPI.
    """
    library = load()
    world = library.world
    mine = f"{world.Get_rank()} {platform.node()}"
    members = [text.decode().split(" ", 1) for text in options.tell_all("mpi/rank", mine)]
    numbers = [int(number) for number, _ in members]
    if len(set(numbers)) < options.size:
        raise UsageError(
            "the ranks were not started together by MPI",
            group=options.name,
            rank=options.rank,
            world_size=options.size,
            seen=f"MPI sees {world.Get_size()} of {options.size} ranks",
            fix=f"Start the program with: mpirun -n {options.size} python PROGRAM",
        )
    num_here = sum(node == platform.node() for _, node in members)
    with library.lock:
        group = world.Get_group().Incl(numbers)
        comm = world.Create_group(group, zlib.crc32(options.name.encode()) & 0x7FFF)
        group.Free()
    cores = min(os.cpu_count() or 1, cpu_quota())
    return MpiBackend(library, comm, options, oversubscribed=num_here > cores)
