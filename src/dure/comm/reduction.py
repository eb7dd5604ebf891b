"""The reference reduction, which every backend's reductions must equal, bit by bit.

The inputs are one tensor per rank, the output is one tensor. The *accumulator* starts as rank 0's
tensor; those of rank 1, rank 2, ... are folded in one after another, so the order never depends on
size, chunk or timing. The accumulator depends on the dtype:

* 16 and 8 bit floats accumulate in float32 and are rounded once, at the end (over nccl, floats
  of 16 bits as NCCL does);
* complex sums and averages are those of the real and imaginary parts; complex products multiply
  as complex numbers (complex32 as complex64);
* bool knows *or* (SUM, MAX, BOR), *and* (PRODUCT, MIN, BAND) and *xor* (BXOR);
* unsigned integers are folded as signed ones of the same width: sums, products and bit operations
  wrap around to the same bits; for MIN and MAX the top bit is flipped, which maps the unsigned
  order onto the signed one (torch's CPU operators lack most of uint16, uint32 and uint64);
* AVG divides the accumulator by the number of ranks, before it is rounded; the quotient of integers
  is truncated towards zero, as NCCL's is.

The threads backend reduces with this, torch engines do so where the engine itself cannot, and the
tests of every other backend are held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dure.comm.ops import ReduceOp

_Fold = Callable[[torch.Tensor, torch.Tensor], object]

_FOLDS: dict[str, _Fold] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MIN": lambda acc, t: torch.minimum(acc, t, out=acc),
    "MAX": lambda acc, t: torch.maximum(acc, t, out=acc),
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
}
_BOOL_AS = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
_SIGNED_TWIN = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor [*] of any dtype as its bytes, a uint8 tensor [nbytes]."""
    flat = tensor.detach().view(-1)
    if flat.stride(0) != 1:  # one element may have any stride and yet be contiguous
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of `tensors`, one after another, as a new tensor."""
    return torch.cat([as_bytes(t) for t in tensors])


def reduce_in_order(tensors: Sequence[torch.Tensor], op: ReduceOp, out: torch.Tensor) -> None:
    """Reduce `tensors`, in their order, into `out`.

    Args:
        tensors: One for each rank, in the order of ranks; at least one.
        op: The reduction; it must have a meaning for the dtype (`ops.check_reducible`).
        out: Where the result goes; it may be one of `tensors`.

    Shapes:
        All contiguous, of one dtype, device and number of elements; the shapes may differ.

    Cost:
        n - 1 passes over the tensor. `out` is the accumulator, unless it is one of the later
        tensors, or of 8 or 16 bit floats; then that is a tensor of its own.

    Numerics:
        As the text of this module says; bitwise the same for the same `tensors`, always.
    """
    flats = [t.detach().reshape(-1) for t in tensors]
    target = out.detach().view(-1)
    dtype = target.dtype
    if dtype.is_complex and op.name in ("SUM", "AVG"):
        flats = [torch.view_as_real(t).view(-1) for t in flats]
        target = torch.view_as_real(target).view(-1)
    elif dtype in _SIGNED_TWIN:
        _reduce_unsigned(flats, op, target)
        return
    name = _BOOL_AS.get(op.name, op.name) if dtype == torch.bool else op.name
    _fold(flats, name, target)


def _fold(flats: Sequence[torch.Tensor], name: str, target: torch.Tensor) -> None:
    """Fold `flats` from left to right, in the accumulator's dtype, and round into `target`."""
    wide = accumulator_dtype(target.dtype)
    in_place = target.dtype is wide and all(t.data_ptr() != target.data_ptr() for t in flats[1:])
    acc = target if in_place else flats[0].to(wide, copy=True)
    if in_place and flats[0].data_ptr() != acc.data_ptr():
        acc.copy_(flats[0])
    fold = _FOLDS[name]
    for t in flats[1:]:
        fold(acc, t.to(wide))
    if name == "AVG":
        divide(acc, len(flats), acc)
    if not in_place:
        target.copy_(acc)


def divide(total: torch.Tensor, size: int, out: torch.Tensor) -> None:
    """Write `total` / `size` into `out`, which may be `total`; truncate integers towards zero.

    Args:
        total: The sum of `size` ranks, in the accumulator's dtype.
        size: Ranks, at least one.
        out: Of the shape of `total`.
    """
    if total.dtype.is_floating_point or total.dtype.is_complex:
        torch.div(total, size, out=out)
        return
    if total.dtype != torch.uint64:
        out.copy_(torch.div(total.to(torch.int64), size, rounding_mode="trunc"))
        return
    # Half of it is a positive int64. Twice the quotient of that is right, or one too small.
    bits = total.view(torch.int64)
    quotient = (bits >> 1 & torch.iinfo(torch.int64).max) // size * 2
    out.view(torch.int64).copy_(quotient + (bits - quotient * size >= size))


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of `dtype` are folded."""
    if dtype == torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _reduce_unsigned(flats: Sequence[torch.Tensor], op: ReduceOp, target: torch.Tensor) -> None:
    """Reduce uint16, uint32 or uint64 as signed integers of the same width."""
    twin = _SIGNED_TWIN[target.dtype]
    signed = [t.view(twin) for t in flats]
    if op.name == "AVG":
        _fold(signed, "SUM", target.view(twin))
        divide(target, len(flats), target)
        return
    if op.name not in ("MIN", "MAX"):
        _fold(signed, op.name, target.view(twin))
        return
    top_bit = torch.iinfo(twin).min
    result = target.view(twin)
    _fold([t ^ top_bit for t in signed], op.name, result)
    result.bitwise_xor_(top_bit)
