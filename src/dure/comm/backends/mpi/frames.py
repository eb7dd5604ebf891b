"""Frames: the short messages with which every collective over MPI begins.

Each rank sends every other rank one *frame* of fixed size. It holds the *signature* of the call,
which must be the same on all ranks; the line of the program that made it; how many bytes this rank
will send to the receiver; and these bytes themselves where they are few (*inline*), so that a small
collective needs nothing but frames. All ranks see all signatures before any data are touched, so
all of them find the same mismatch.

The frames of all operations are sent and received in the same memory by the same persistent
requests. That is safe because a group's collectives run one after another, and MPI keeps the order
of messages between two ranks: a peer that is already at the next operation is at most that far.

Cost: n - 1 messages of `FRAME` bytes a rank; one step.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.comm.backends.mpi.memory import Piece
from dure.comm.backends.shm.codes import dtype_code
from dure.comm.ops import ReduceOp
from dure.errors import Desync

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["FRAME", "INLINE", "Call", "Frames", "Stage"]

FRAME = 512
INLINE = 256
_SIGNATURE = struct.Struct("<7q")
_GIVES = struct.Struct("<q")
_INLINE_AT = FRAME - INLINE
_SITE_AT = 64
_SITE_BYTES = _INLINE_AT - _SITE_AT
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_NO_REDUCTION = -1
_OPERATIONS = (
    "barrier",
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)


class Call(NamedTuple):
    """What is called; equal on all ranks, or they do not belong together.

    Attributes:
        op: The operation.
        dtype: Of the tensors, if there are any.
        reduction: The reduction, if it is one.
        root: The rank that gives or takes all; -1 if there is none.
        numel: Elements, as far as all ranks must agree on them.
        lengths: The elements of each rank's part, where all ranks must agree on them.
    """

    op: str
    dtype: torch.dtype | None = None
    reduction: ReduceOp | None = None
    root: int = -1
    numel: int = 0
    lengths: tuple[int, ...] = ()

    def pack(self, seq: int) -> bytes:
        """Return the call's signature, as operation number `seq`."""
        return _SIGNATURE.pack(
            seq,
            _OPERATIONS.index(self.op),
            -1 if self.dtype is None else dtype_code(self.dtype),
            _NO_REDUCTION if self.reduction is None else self.reduction.code,
            self.root,
            self.numel,
            zlib.crc32(repr(self.lengths).encode()) if self.lengths else 0,
        )


class Stage(NamedTuple):
    """Requests that run together, receives first.

    Attributes:
        requests: Of MPI.
        peers: The rank that each is with; -1 for anyone.
        num_receives: How many of them are receives; these can be called off.
        statuses: Filled when all have ended, where they matter.
    """

    requests: list[Any]
    peers: Sequence[int]
    num_receives: int = 0
    statuses: list[Any] | None = None


class Frames:
    """The frames of one group, seen from one rank.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The group's communicator.
        tag: Which messages are frames.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, tag: int) -> None:
        self._mpi, self._rank, self._size = mpi, comm.Get_rank(), comm.Get_size()
        self._memory = torch.zeros((2, self._size, FRAME), dtype=torch.uint8)
        start = self._memory.data_ptr()
        spots = [mpi.memory.fromaddress(start + i * FRAME, FRAME) for i in range(2 * self._size)]
        self._out = [memoryview(spot) for spot in spots[: self._size]]
        self._in = [memoryview(spot) for spot in spots[self._size :]]
        self._in_address = start + self._size * FRAME
        self._peers = [r for r in range(self._size) if r != self._rank]
        sends = [comm.Send_init(spots[r], r, tag) for r in self._peers]
        receives = [comm.Recv_init(spots[self._size + r], r, tag) for r in self._peers]
        both = [*self._peers, *self._peers]
        self._stage = Stage([*receives, *sends], both, len(receives))
        self._mine = self._site = b""

    def start(self, call: Call, seq: int, site: str, gives: Sequence[Piece]) -> Stage:
        """Send the frames of a call.

        Args:
            call: What is called.
            seq: Its number.
            site: File and line of the program.
            gives: What this rank is about to send to each; few bytes are sent at once.
        """
        self._mine = call.pack(seq)
        self._site = site.encode()[-_SITE_BYTES:].ljust(_SITE_BYTES, b"\0")
        for r in self._peers:
            out, (address, nbytes) = self._out[r], gives[r]
            out[: _SIGNATURE.size] = self._mine
            out[_SITE_AT:_INLINE_AT] = self._site
            _GIVES.pack_into(out, _SIGNATURE.size, nbytes)
            if 0 < nbytes <= INLINE:
                there = self._mpi.memory.fromaddress(address, nbytes)
                out[_INLINE_AT : _INLINE_AT + nbytes] = there
        if self._peers:
            self._mpi.Prequest.Startall(self._stage.requests)
        return self._stage

    def check(self, takes: Sequence[Piece]) -> None:
        """Compare the calls, and what peers are about to send with what there is room for.

        Raises:
            Desync: `calls` says what each rank called.
        """
        for r in self._peers:
            if bytes(self._in[r][: _SIGNATURE.size]) != self._mine:
                raise self._mismatch("the ranks did not call the same thing")
        for r in self._peers:
            gives, room = self._gives(r), takes[r][1]
            if gives != room:
                raise self._mismatch(
                    f"rank {r} sends {gives} bytes, and rank {self._rank} expects {room}"
                )

    def land(self, takes: Sequence[Piece]) -> None:
        """Copy what came with the frames to its place."""
        for r in self._peers:
            address, nbytes = takes[r]
            if 0 < nbytes <= INLINE and address != self.inline_address(r):
                there = memoryview(self._mpi.memory.fromaddress(address, nbytes))
                there[:] = self._in[r][_INLINE_AT : _INLINE_AT + nbytes]

    def inline_address(self, rank: int) -> int:
        """Return where the bytes are that came with the frame of `rank`."""
        return self._in_address + rank * FRAME + _INLINE_AT

    def close(self) -> None:
        """Give the requests back; none of them may be under way."""
        for request in self._stage.requests:
            request.Free()

    def _gives(self, rank: int) -> int:
        return _GIVES.unpack_from(self._in[rank], _SIGNATURE.size)[0]

    def _mismatch(self, what: str) -> Desync:
        frames = [bytes(self._in[r][:_INLINE_AT]) for r in range(self._size)]
        frames[self._rank] = self._mine.ljust(_SITE_AT, b"\0") + self._site
        calls = {r: _describe(frame) for r, frame in enumerate(frames)}
        return Desync(
            what,
            calls=calls,
            seen="; ".join(f"rank {r} called {text}" for r, text in calls.items()),
            fix="Make every rank call the same operations in the same order.",
        )


def _describe(frame: bytes) -> str:
    """Say a frame's signature in words."""
    seq, op, dtype, reduction, root, count, lengths = _SIGNATURE.unpack_from(frame)
    words = [f"#{seq} {_OPERATIONS[op]}"]
    if dtype >= 0:
        words.append(f"{_dtype_of(dtype)} [{count}]".removeprefix("torch."))
    if reduction != _NO_REDUCTION:
        words.append(_REDUCTIONS[reduction])
    if root >= 0:
        words.append(f"root {root}")
    if lengths:
        words.append(f"lengths of checksum {lengths:08x}")
    site = frame[_SITE_AT:].rstrip(b"\0").decode(errors="replace")
    if site:
        words.append(f"at {site}")
    return " ".join(words)


def _dtype_of(code: int) -> torch.dtype:
    dtypes = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    return next(d for d in dtypes if dtype_code(d) == code)
