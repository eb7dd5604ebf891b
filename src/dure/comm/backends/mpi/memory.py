"""Pieces of memory that MPI sends: addresses and lengths.

MPI takes objects with Python's buffer interface; `MPI.memory.fromaddress` makes one from an
address, so tensors are not copied or converted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from dure.comm.codes import dtype_code
from dure.comm.ops import ReduceOp
from dure.comm.reduction import reduce_in_order
from dure.native import available as native_available
from dure.native import reduce as native_reduce

__all__ = [
    "NOTHING",
    "Piece",
    "copy_piece",
    "cut",
    "message_of",
    "piece_of",
    "reduce_pieces",
    "shares",
    "staging",
]

Piece = tuple[int, int]
"""Memory: address and number of bytes."""

NOTHING: Piece = (0, 0)

_LONGEST = 1 << 30
"""Bytes up to which a message is sent as bytes; MPI counts in 32 bits."""

_LINE = 64
_NATIVE = native_available()[0]


def piece_of(tensor: torch.Tensor) -> Piece:
    """Return the memory of a contiguous tensor."""
    return tensor.data_ptr(), tensor.nbytes


def shares(piece: Piece, n: int, width: int = 1) -> list[Piece]:
    """Cut `piece` into `n` pieces of about equal length, of elements of `width` bytes."""
    start, nbytes = piece
    count = nbytes // width
    ends = [count * i // n * width for i in range(n + 1)]
    return [(start + a, b - a) for a, b in pairwise(ends)]


def cut(piece: Piece, begin: int, longest: int) -> Piece:
    """Return at most `longest` bytes of `piece` from `begin` on; nothing if it ends before."""
    address, nbytes = piece
    return address + begin, max(0, min(longest, nbytes - begin))


def staging(nbytes: int, n: int) -> tuple[torch.Tensor, list[Piece]]:
    """Make room for `n` times `nbytes`; the tensor owns the memory."""
    step = (nbytes + _LINE - 1) // _LINE * _LINE
    owner = torch.empty(step * n, dtype=torch.uint8, device="cpu")
    start = owner.data_ptr()
    return owner, [(start + i * step, nbytes) for i in range(n)]


def message_of(mpi: Any, piece: Piece) -> Any:
    """Return `piece` as the buffer of one message.

    A long one is a single element of a datatype: several messages could reach different receives.
    """
    memory = mpi.memory.fromaddress(*piece)
    return memory if piece[1] <= _LONGEST else [memory, 1, _long_datatype(mpi, piece[1], _LONGEST)]


@functools.cache
def _long_datatype(mpi: Any, nbytes: int, longest: int) -> Any:
    """Return the datatype of `nbytes` bytes; it is kept, as there are few such lengths."""
    begins = range(0, nbytes, longest)
    lengths = [min(longest, nbytes - begin) for begin in begins]
    return mpi.BYTE.Create_hindexed(lengths, list(begins)).Commit()


def copy_piece(mpi: Any, source: Piece, target: Piece) -> None:
    """Copy `source` to `target`, as far as both go."""
    nbytes = min(source[1], target[1])
    if nbytes and source[0] != target[0]:
        memory = mpi.memory.fromaddress
        memoryview(memory(target[0], nbytes))[:] = memory(source[0], nbytes)


def reduce_pieces(
    mpi: Any, parts: Sequence[Piece], dtype: torch.dtype, op: ReduceOp, out: Piece
) -> None:
    """Reduce `parts`, one of each rank, in their order, into `out`, which may be one of them."""
    if not out[1]:
        return
    if _NATIVE:
        sources = [address for address, _ in parts]
        native_reduce(out[0], sources, dtype_code(dtype), op.code, out[1] // dtype.itemsize)
        return
    memory = mpi.memory.fromaddress
    tensors = [torch.frombuffer(memory(*p), dtype=torch.uint8).view(dtype) for p in [*parts, out]]
    reduce_in_order(tensors[:-1], op, tensors[-1])
