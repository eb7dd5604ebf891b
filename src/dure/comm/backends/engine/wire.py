"""Wire dtypes: tensors that an engine reduces in place of those that it cannot reduce itself.

Gloo and NCCL support a few dtypes, and round 16 bit floats at every step. So a tensor is sent in a
*wire dtype*: as another tensor, with as many or twice as many elements, which the engine reduces
correctly, and from which the result is copied back into the user's tensor. The conversions work
element by element, so a part of the reduced tensor is the reduction of the part, as reduce-scatter
needs it.

| dtype, operation                         | on the wire                                       |
|------------------------------------------|---------------------------------------------------|
| int8, uint8, int32, int64, except AVG    | unchanged                                         |
| 16 and 8 bit floats, SUM PRODUCT AVG     | float32; rounded once in copying back             |
| complex, SUM AVG                         | real and imaginary parts, then as floats          |
| AVG                                      | SUM, divided before it is rounded or truncated    |
| over NCCL: floats, MIN MAX               | integers in the order of the floats               |
| over NCCL: bool                          | uint8, MIN or MAX; xor is an odd SUM              |

NCCL reduces floats of 16 bits and more, and averages floats, itself (`native_floats`): they are
sent unchanged, and are rounded at every step, as in `torch.distributed`.

All other calls have no wire dtype: the engine gathers the tensors of all ranks and
`reduction.reduce_in_order` reduces them. These are reductions that engines do wrong (MIN and MAX of
floats, where they lose NaN; complex PRODUCT; bit operations if the engine has none) and rarely
reduced dtypes (int16, and the wider unsigned ones; bool over Gloo).

The engine chooses the order in which it folds the ranks; integer results do not depend on it, float
results are bitwise equal on all ranks and from run to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dure.comm.ops import ReduceOp
from dure.comm.reduction import accumulator_dtype, divide

__all__ = ["WireTensor", "as_wire"]

_INTEGERS = {torch.uint8, torch.int8, torch.int32, torch.int64}
_BITWISE = {"BAND", "BOR", "BXOR"}
_FOLDED = {"SUM", "PRODUCT", "AVG"}
_BOOL_AS = {
    **dict.fromkeys(("SUM", "MAX", "BOR"), "MAX"),
    **dict.fromkeys(("PRODUCT", "MIN", "BAND"), "MIN"),
    "BXOR": "SUM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTensor:
    """A tensor that the engine can reduce.

    Attributes:
        wire: Flat; the user's own memory where `copy_back` is None.
        op: Name of the operation for the engine.
        copy_back: Called with a part of the reduced tensor and the flat tensor it belongs in.
    """

    wire: torch.Tensor
    op: str
    copy_back: Callable[[torch.Tensor, torch.Tensor], object] | None = None


def as_wire(
    tensor: torch.Tensor,
    op: ReduceOp,
    size: int,
    bitwise: bool = True,
    native_floats: bool = False,
) -> WireTensor | None:
    """Return the wire form of a contiguous `tensor` [*] for `op`, or None if there is none.

    Args:
        tensor: This rank's input.
        op: A reduction that has a meaning for the dtype.
        size: Ranks, for AVG.
        bitwise: Whether the engine has BAND, BOR and BXOR.
        native_floats: Whether it is NCCL, which reduces floats of 16 bits, and averages floats.

    Cost:
        None for float32, float64, int8, uint8, int32 and int64, except one pass after an average
        (with `native_floats` also none for bool, floats of 16 bits and averages of floats; some
        five passes for MIN and MAX of floats). Else one or two passes over the tensor before and
        after, and memory for the wire tensor.
    """
    flat = tensor.detach().view(-1)
    if flat.dtype in _INTEGERS and op.name != "AVG":
        return WireTensor(wire=flat, op=op.name) if bitwise or op.name not in _BITWISE else None
    folded = flat.dtype.is_floating_point or flat.dtype.is_complex or flat.dtype in _INTEGERS
    if native_floats and flat.dtype == torch.bool and op.name in _BOOL_AS:
        return _bool_wire(flat, op.name)
    if native_floats and flat.dtype.is_floating_point and op.name in ("MIN", "MAX"):
        return _ordered_wire(flat, op.name)
    if op.name not in _FOLDED or not folded:
        return None
    if flat.dtype.is_complex:
        if op.name == "PRODUCT":
            return None
        inner = as_wire(torch.view_as_real(flat), op, size, bitwise, native_floats)
        assert inner is not None
        copy_parts = inner.copy_back or _copy_back
        return WireTensor(
            wire=inner.wire,
            op=inner.op,
            copy_back=lambda wire, out: copy_parts(wire, torch.view_as_real(out).view(-1)),
        )
    if native_floats and flat.dtype.is_floating_point and flat.dtype.itemsize > 1:
        return WireTensor(wire=flat, op=op.name)
    wide = flat.to(accumulator_dtype(flat.dtype))
    if op.name == "AVG":
        return WireTensor(wire=wide, op="SUM", copy_back=lambda wire, out: divide(wire, size, out))
    return WireTensor(wire=wide, op=op.name, copy_back=None if wide is flat else _copy_back)


def _bool_wire(flat: torch.Tensor, name: str) -> WireTensor:
    """Return a bool tensor as 0 and 1."""
    if name != "BXOR":
        return WireTensor(wire=flat.view(torch.uint8), op=_BOOL_AS[name])
    return WireTensor(
        wire=flat.to(torch.uint8),
        op="SUM",  # it wraps around, and stays even or odd
        copy_back=lambda wire, out: out.copy_(wire & 1),
    )


def _ordered_wire(flat: torch.Tensor, name: str) -> WireTensor:
    """Return floats as integers that have their order, for MIN and MAX.

    The bits of a float are a sign and a magnitude: those of negative floats are flipped, all but
    the sign. NaN becomes the integer that wins, which is in turn the bits of a NaN.
    """
    wide = flat if flat.dtype.itemsize >= 4 else flat.float()
    integer = torch.int64 if wide.dtype.itemsize == 8 else torch.int32
    limits = torch.iinfo(integer)

    def flipped(bits: torch.Tensor) -> torch.Tensor:
        return bits ^ ((bits >> (limits.bits - 1)) & limits.max)

    wire = flipped(wide.view(integer))
    wire.masked_fill_(wide.isnan(), limits.max if name == "MAX" else limits.min)
    return WireTensor(
        wire=wire,
        op=name,
        copy_back=lambda wire, out: out.copy_(flipped(wire).view(wide.dtype)),
    )


def _copy_back(wire: torch.Tensor, out: torch.Tensor) -> None:
    """Copy, unless the engine worked in the user's memory."""
    if wire.data_ptr() != out.data_ptr():
        out.copy_(wire)
