"""What an engine reduces in place of what it cannot reduce itself.

Gloo and NCCL know a handful of dtypes, round 16 bit floats at every step, and lose NaN in MIN and
MAX. So a tensor travels in a *wire dtype*: as another tensor, of as many or twice as many
elements, whose reduction the engine does right, and from which the result is copied back into the
user's tensor. All of these work element by element, so a part of the reduced tensor is that of the
part, which is what reduce-scatter needs.

| dtype, operation                         | on the wire                                       |
|------------------------------------------|---------------------------------------------------|
| 16 and 8 bit floats, SUM PRODUCT AVG     | float32; rounded once in copying back             |
| all floats, MIN MAX                      | integers in the same order (`_sort_keys`)         |
| complex, SUM AVG                         | real and imaginary parts, then as floats          |
| bool                                     | uint8 with MAX (or), MIN (and), BXOR              |
| int16, uint16                            | int32, which wraps around to the same low bits    |
| uint32, uint64                           | signed of the same width; MIN MAX: top bit flipped|
| AVG                                      | SUM, divided before it is rounded                 |

What is left (complex PRODUCT; bit operations where the engine has none) has no wire dtype: the
engine gathers the tensors of all ranks and `reduction.reduce_in_order` does the rest.

The order in which the engine folds the ranks is its own; integer results do not depend on it,
float results are bitwise equal on all ranks and from run to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dure.comm.ops import ReduceOp

__all__ = ["WireTensor", "as_wire"]

CopyBack = Callable[[torch.Tensor, torch.Tensor], object]

_DIRECT_INTEGERS = {torch.uint8, torch.int8, torch.int32, torch.int64}
_DIRECT_FLOATS = {torch.float32, torch.float64}
_KEY_OF = {torch.float32: torch.int32, torch.float64: torch.int64}
_SIGNED_TWIN = {torch.uint32: torch.int32, torch.uint64: torch.int64}
_BITWISE = {"BAND", "BOR", "BXOR"}
_BOOL_AS = {
    "SUM": "MAX",
    "MAX": "MAX",
    "BOR": "MAX",
    "PRODUCT": "MIN",
    "MIN": "MIN",
    "BAND": "MIN",
    "BXOR": "BXOR",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTensor:
    """A tensor that the engine can reduce.

    Attributes:
        wire: Flat; the user's own memory where `copy_back` is None.
        op: Name of the operation for the engine.
        land: Called with a part of the reduced tensor and the flat tensor it belongs in.
    """

    wire: torch.Tensor
    op: str
    copy_back: CopyBack | None = None


def as_wire(
    tensor: torch.Tensor, op: ReduceOp, size: int, bitwise: bool = True
) -> WireTensor | None:
    """Return the wire form of a contiguous `tensor` [*] for `op`, or None if there is none.

    Args:
        tensor: What this rank contributes.
        op: A reduction that has a meaning for the dtype.
        size: Ranks, for AVG.
        bitwise: Whether the engine has BAND, BOR and BXOR.

    Cost:
        None for float32, float64, int8, uint8, int32 and int64 (but floats' MIN, MAX); elsewhere
        one to three passes over the tensor before and after, and a tensor of the wire form's size.
    """
    flat = tensor.detach().view(-1)
    dtype = flat.dtype
    if op.name in _BITWISE and not bitwise and not (dtype is torch.bool and op.name != "BXOR"):
        return None
    if dtype.is_complex:
        return _wire_complex(flat, op, size)
    if dtype.is_floating_point:
        return _wire_floats(flat, op, size)
    if dtype is torch.bool:
        return WireTensor(
            wire=flat.view(torch.uint8),
            op=_BOOL_AS[op.name],
            copy_back=lambda wire, out: _settle(wire, out.view(torch.uint8)),
        )
    return _wire_integers(flat, op)


def _settle(wire: torch.Tensor, out: torch.Tensor) -> None:
    """Copy, unless the engine worked in the user's memory."""
    if wire.data_ptr() != out.data_ptr():
        out.copy_(wire)


def _wire_complex(flat: torch.Tensor, op: ReduceOp, size: int) -> WireTensor | None:
    if op.name == "PRODUCT":
        return None
    inner = _wire_floats(torch.view_as_real(flat).view(-1), op, size)
    copy_back = inner.copy_back or _settle
    return WireTensor(
        wire=inner.wire,
        op=inner.op,
        copy_back=lambda wire, out: copy_back(wire, torch.view_as_real(out).view(-1)),
    )


def _wire_floats(flat: torch.Tensor, op: ReduceOp, size: int) -> WireTensor:
    wide = flat if flat.dtype in _DIRECT_FLOATS else flat.to(torch.float32)
    if op.name in ("MIN", "MAX"):
        return WireTensor(
            wire=_sort_keys(wide, op.name == "MAX"),
            op=op.name,
            copy_back=lambda wire, out: out.copy_(_from_keys(wire)),
        )
    if op.name == "AVG":
        return WireTensor(wire=wide, op="SUM", copy_back=lambda wire, out: out.copy_(wire / size))
    return WireTensor(wire=wide, op=op.name, copy_back=None if wide is flat else _settle)


def _sort_keys(floats: torch.Tensor, nan_is_high: bool) -> torch.Tensor:
    """Return integers in the order of `floats`, NaN at the end that wins.

    Read as signed integers, positive floats are in order and negative ones in reverse; flipping
    all but the sign bit of the negative ones mends that, and flipping again brings the floats back.
    """
    dtype = _KEY_OF[floats.dtype]
    limits = torch.iinfo(dtype)
    keys = _flip_negatives(floats.view(dtype))
    return keys.masked_fill_(floats.isnan(), limits.max if nan_is_high else limits.min)


def _from_keys(keys: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if keys.dtype is torch.int32 else torch.float64
    return _flip_negatives(keys).view(dtype)


def _flip_negatives(bits: torch.Tensor) -> torch.Tensor:
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def _wire_integers(flat: torch.Tensor, op: ReduceOp) -> WireTensor:
    dtype = flat.dtype
    if dtype in _DIRECT_INTEGERS:
        return WireTensor(wire=flat, op=op.name)
    if dtype is torch.int16:
        return WireTensor(wire=flat.to(torch.int32), op=op.name, copy_back=_settle)
    if dtype is torch.uint16:
        return WireTensor(
            wire=flat.view(torch.int16).to(torch.int32) & 0xFFFF,
            op=op.name,
            copy_back=lambda wire, out: out.view(torch.int16).copy_(wire),
        )
    twin = _SIGNED_TWIN[dtype]
    if op.name not in ("MIN", "MAX"):
        return WireTensor(
            wire=flat.view(twin),
            op=op.name,
            copy_back=lambda wire, out: _settle(wire, out.view(twin)),
        )
    top_bit = torch.iinfo(twin).min
    return WireTensor(
        wire=flat.view(twin) ^ top_bit,
        op=op.name,
        copy_back=lambda wire, out: out.view(twin).copy_(wire ^ top_bit),
    )
