"""The MPI backend: our collectives, carried by the messages of any MPI that mpi4py finds.

MPI's own reductions know no bfloat16 and fold the ranks in an order of their own, and its
collectives can neither be interrupted nor given up on. So MPI is used for what it is best at,
getting bytes from rank to rank over whatever the machine has: each collective is a few *exchanges*,
in which every rank sends and receives at most one message to and from every other, and the
reductions are those of the native engine (see `reduction` for their order).

With S bytes a rank, n ranks, and one exchange of frames (see `mpi_frames`) before all:

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

import os
import platform
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.backends.base import BackendOptions, Ticket
from dure.comm.backends.mpi_frames import INLINE, NOTHING, Call, Frames, Piece, Stage
from dure.comm.backends.mpi_lane import Lane, Operation, Steps, heard
from dure.comm.backends.mpi_library import Library, load
from dure.comm.backends.shm_codes import dtype_code
from dure.comm.ops import ReduceOp
from dure.comm.reduction import reduce_in_order
from dure.errors import Desync, UsageError
from dure.native import available as native_available
from dure.native import reduce as native_reduce

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiBackend", "create_mpi"]

_FEW = 32 << 10
"""Bytes up to which all_reduce and broadcast take one exchange: see docs/log.md."""

_SEGMENT = 1 << 20
"""Bytes of a slice that travel before the next are sent: they are reduced while in the cache."""

_LONGEST = 1 << 30
"""Bytes of one message; MPI counts in 32 bits."""

_RESERVED_TAGS = 3


class MpiBackend:
    """One rank's part of a group over MPI; the contract is that of `Backend`.

    Threads: as the contract says; see `mpi_lane`.
    """

    name = "mpi"
    device_types = frozenset({"cpu"})

    def __init__(
        self, library: Library, comm: MPI.Intracomm, options: BackendOptions, crowded: bool
    ) -> None:
        self._library, self._comm, self._mpi = library, comm, library.MPI
        self._rank, self._size = options.rank, options.size
        self._peers = [r for r in range(options.size) if r != options.rank]
        highest = _highest_tag(self._mpi, comm)
        self._verdict_tag, self._data_tag = highest, highest - 1
        self._num_tags = highest - _RESERVED_TAGS + 1
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
        taken = [(r, part) for r in self._peers for part in _messages(takes[r], least)]
        given = [(r, part) for r in self._peers for part in _messages(gives[r], least)]
        requests = [comm.Irecv(memory(*part), r, tag) for r, part in taken]
        requests += [comm.Isend(memory(*part), r, tag) for r, part in given]
        return Stage(requests, [r for r, _ in taken] + [r for r, _ in given], len(taken))

    def _open(
        self, call: Call, gives: Sequence[Piece] | None = None, takes: Sequence[Piece] | None = None
    ) -> Steps:
        """Exchange frames, then what they say; few bytes come with the frames themselves."""
        nothing = [NOTHING] * self._size
        gives, takes = gives or nothing, takes or nothing
        head = self._lane.head
        yield self._frames.start(call, head.seq or 0, head.site, gives)
        self._frames.check(takes)
        self._frames.land(takes)
        rest = any(gives[r][1] > INLINE or takes[r][1] > INLINE for r in self._peers)
        if rest:
            self._lane.look(self._lane.head)
            yield self._exchange(gives, takes, INLINE)
        _copy(self._mpi, gives[self._rank], takes[self._rank])

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
        staging = None
        if nbytes <= INLINE:
            places = [self._frames.inline_address(r) for r in range(self._size)]
            takes = [(place, nbytes) for place in places]
        else:
            staging, takes = self._staging(nbytes)
        takes[self._rank] = (here, nbytes)
        yield from self._open(call, [(here, nbytes)] * self._size, takes)
        _reduce(self._mpi, takes, tensor.dtype, op, (here, nbytes))
        del staging

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
        nothing, here = [NOTHING] * self._size, self._rank == dst
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
        parts = [_piece(t) for t in inputs]
        steps = self._reduce_scatter(tensor, parts, op, (tensor, inputs))
        return self._run("reduce_scatter", steps, async_op)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, async_op: bool
    ) -> Ticket | None:
        """See `Backend.reduce_scatter_single`."""
        parts = _even(tensor, self._size)
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
        out = _piece(output)
        for begin in range(0, max(lengths), _SEGMENT):
            slices = [_cut(part, begin) for part in parts]
            yield from self._reduce_slices(slices, _cut(out, begin), output.dtype, op)
        del owners

    def _reduce_slices(
        self, slices: Sequence[Piece], out: Piece, dtype: torch.dtype, op: ReduceOp
    ) -> Steps:
        """Reduce slice i of all ranks on rank i; this rank's result goes to `out`."""
        staging, takes = self._staging(slices[self._rank][1])
        takes[self._rank] = slices[self._rank]
        yield self._exchange(slices, takes)
        _reduce(self._mpi, takes, dtype, op, out)
        del staging

    def _staging(self, nbytes: int) -> tuple[torch.Tensor, list[Piece]]:
        """Make room for `nbytes` of each rank."""
        step = (nbytes + 63) & ~63
        staging = torch.empty(step * self._size, dtype=torch.uint8)
        start = staging.data_ptr()
        return staging, [(start + r * step, nbytes) for r in range(self._size)]

    def _segments(self, tensor: torch.Tensor) -> Iterator[list[Piece]]:
        """Cut a tensor into segments, and each of these into one slice for each rank."""
        width, (start, nbytes) = tensor.element_size(), _piece(tensor)
        longest = _SEGMENT // width * width * self._size
        for begin in range(0, nbytes, longest):
            count = min(longest, nbytes - begin) // width
            ends = [begin + count * r // self._size * width for r in range(self._size + 1)]
            yield [(start + a, b - a) for a, b in pairwise(ends)]

    # Movements ----------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool) -> Ticket | None:
        """See `Backend.broadcast`."""
        few = tensor.nbytes <= _FEW or self._size == 2
        steps = self._broadcast_few(tensor, src) if few else self._broadcast_many(tensor, src)
        return self._run("broadcast", steps, async_op)

    def _broadcast_few(self, tensor: torch.Tensor, src: int) -> Steps:
        call = Call("broadcast", tensor.dtype, root=src, numel=tensor.numel())
        gives, takes = [NOTHING] * self._size, [NOTHING] * self._size
        if self._rank == src:
            gives = [_piece(tensor)] * self._size
        else:
            takes[src] = _piece(tensor)
        yield from self._open(call, gives, takes)

    def _broadcast_many(self, tensor: torch.Tensor, src: int) -> Steps:
        yield from self._open(Call("broadcast", tensor.dtype, root=src, numel=tensor.numel()))
        count, (start, _) = self._size, _piece(tensor)
        ends = [tensor.numel() * r // count * tensor.element_size() for r in range(count + 1)]
        slices = [(start + a, b - a) for a, b in pairwise(ends)]
        nothing, mine = [NOTHING] * count, slices[self._rank]
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
        gives = [_piece(tensor)] * self._size
        return self._move(call, gives, [_piece(t) for t in outputs], (tensor, outputs), async_op)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_gather_single`."""
        call = Call("all_gather", tensor.dtype, numel=output.numel())
        gives, takes = [_piece(tensor)] * self._size, _even(output, self._size)
        return self._move(call, gives, takes, (tensor, output), async_op)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        dst: int,
        async_op: bool,
    ) -> Ticket | None:
        """See `Backend.gather`."""
        gives, takes = [NOTHING] * self._size, [NOTHING] * self._size
        gives[dst] = _piece(tensor)
        if outputs is not None:
            takes = [_piece(t) for t in outputs]
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
        gives, takes = [NOTHING] * self._size, [NOTHING] * self._size
        takes[src] = _piece(tensor)
        if inputs is not None:
            gives = [_piece(t) for t in inputs]
        call = Call("scatter", tensor.dtype, root=src)
        return self._move(call, gives, takes, (tensor, inputs), async_op)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_to_all`."""
        call = Call("all_to_all", inputs[0].dtype)
        gives, takes = [_piece(t) for t in inputs], [_piece(t) for t in outputs]
        return self._move(call, gives, takes, (inputs, outputs), async_op)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_to_all_single`."""
        call = Call("all_to_all", tensor.dtype)
        source = tensor.clone() if tensor.data_ptr() == output.data_ptr() else tensor
        gives, takes = _even(source, self._size), _even(output, self._size)
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
        parts = _messages(_piece(tensor), -1)
        requests = [self._comm.Isend(memory(*part), dst, tag) for part in parts]
        yield Stage(requests, [dst] * len(requests))

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Ticket:
        """See `Backend.recv`."""
        self._check_tag(tag)
        operation = Operation(self._lane, "recv", _no_steps(), src)
        operation.steps = self._recv(operation, tensor, src, tag)
        return self._lane.message(operation, async_op)

    def _recv(self, operation: Operation, tensor: torch.Tensor, src: int | None, tag: int) -> Steps:
        """Receive; of a long message, the parts after the first come from where that came from."""
        memory, status = self._mpi.memory.fromaddress, self._mpi.Status()
        source = self._mpi.ANY_SOURCE if src is None else src
        for address, nbytes in _messages(_piece(tensor), -1):
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
        if tag >= self._num_tags:
            raise UsageError(
                f"over this MPI a tag must be less than {self._num_tags}", seen=f"tag={tag}"
            )

    # The rest -----------------------------------------------------------------------------------

    def shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """See `Backend.shared_empty`: the ranks share no memory."""
        del nbytes
        return None

    def close(self, abort: bool) -> None:
        """See `Backend.close`; the communicator is freed once all peers have left as well."""
        del abort
        if not self._lane.close():
            return
        with self._library.lock:
            self._frames.close()
            self._library.retired.append(_Retired(self._comm, self._verdict_tag, self._peers))
            _free_retired(self._library)


class _Retired:
    """The communicator of a group that this rank left in good order."""

    def __init__(self, comm: MPI.Intracomm, tag: int, peers: Sequence[int]) -> None:
        self.comm, self.tag, self.still_there = comm, tag, set(peers)


def _highest_tag(mpi: Any, comm: MPI.Intracomm) -> int:
    """Return the highest tag of this MPI; 32767 is what every MPI has."""
    return comm.Get_attr(mpi.TAG_UB) or 32_767


def _free_retired(library: Library) -> None:
    """Free the communicators that nobody can write to any more."""
    for old in list(library.retired):
        for peer, verdict in heard(library, old.comm, old.tag):
            if verdict.get("left"):
                old.still_there.discard(peer)
        if not old.still_there:
            library.retired.remove(old)
            old.comm.Free()


# ---- memory --------------------------------------------------------------------------------------


def _piece(tensor: torch.Tensor) -> Piece:
    return tensor.data_ptr(), tensor.nbytes


def _even(tensor: torch.Tensor, n: int) -> list[Piece]:
    start, length = tensor.data_ptr(), tensor.nbytes // n
    return [(start + i * length, length) for i in range(n)]


def _cut(piece: Piece, begin: int) -> Piece:
    """Return the segment of `piece` that begins at `begin`, or nothing if it ends before."""
    address, nbytes = piece
    return address + begin, max(0, min(_SEGMENT, nbytes - begin))


def _messages(piece: Piece, least: int) -> Iterator[Piece]:
    """Yield the messages that `piece` travels in, if it has more than `least` bytes."""
    address, nbytes = piece
    if nbytes > least:
        for begin in range(0, max(nbytes, 1), _LONGEST):
            yield address + begin, min(_LONGEST, nbytes - begin)


def _copy(mpi: Any, source: Piece, target: Piece) -> None:
    """Copy a rank's part for itself."""
    nbytes = min(source[1], target[1])
    if nbytes and source[0] != target[0]:
        memory = mpi.memory.fromaddress
        memoryview(memory(target[0], nbytes))[:] = memory(source[0], nbytes)


def _reduce(mpi: Any, parts: Sequence[Piece], dtype: torch.dtype, op: ReduceOp, out: Piece) -> None:
    """Reduce `parts`, one of each rank, in their order, into `out`, which may be one of them."""
    if not out[1]:
        return
    if native_available()[0]:
        sources = [address for address, _ in parts]
        native_reduce(out[0], sources, dtype_code(dtype), op.code, out[1] // dtype.itemsize)
        return
    memory = mpi.memory.fromaddress
    tensors = [torch.frombuffer(memory(*p), dtype=torch.uint8).view(dtype) for p in [*parts, out]]
    reduce_in_order(tensors[:-1], op, tensors[-1])


def _no_steps() -> Steps:
    yield from ()


# ---- rendezvous ----------------------------------------------------------------------------------


def create_mpi(options: BackendOptions) -> MpiBackend:
    """Make the group's communicator; every rank of the group must do so.

    Raises:
        UsageError: mpi4py or MPI is missing, or the ranks were not started together by MPI.
    """
    library = load()
    world = library.world
    keys = [f"mpi/rank/{r}" for r in range(options.size)]
    mine = f"{world.Get_rank()} {world.Get_size()} {platform.node()}"
    options.store.set(keys[options.rank], mine)
    options.store.wait(keys, options.timeout)
    told = [text.decode().split(" ", 2) for text in options.store.multi_get(keys)]
    numbers = [int(number) for number, _, _ in told]
    if len(set(numbers)) < options.size:
        raise UsageError(
            "the ranks were not started together by MPI",
            group=options.name,
            rank=options.rank,
            world_size=options.size,
            seen=f"MPI sees {world.Get_size()} of {options.size} ranks",
            fix=f"Start the program with: mpirun -n {options.size} python PROGRAM",
        )
    num_here = sum(node == platform.node() for _, _, node in told)
    with library.lock:
        _free_retired(library)
        members = world.Get_group().Incl(numbers)
        comm = world.Create_group(members, zlib.crc32(options.name.encode()) & 0x7FFF)
        members.Free()
    return MpiBackend(library, comm, options, crowded=num_here > (os.cpu_count() or 1))
