"""What one rank alone can know to be wrong, and how odd tensors are made plain.

Backends see dense contiguous tensors only. `readable` and `writable` turn any other tensor into
one: a contiguous tensor passes through as it is; anything else is copied, and `writable` also
returns what copies the result back once the operation has ended.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch

from dure.errors import DeviceError, DtypeError, ShapeError, UsageError

__all__ = [
    "Finish",
    "as_splits",
    "check_list",
    "check_same_dtype",
    "check_tensor",
    "copy_back",
    "readable",
    "run_all",
    "split_bounds",
    "writable",
]

Finish = Callable[[], None]

_BYTE_ADDRESSABLE = "every dtype of torch but the quantized ones"


def check_tensor(tensor: object, op: str, device_types: frozenset[str]) -> None:
    """Raise unless `tensor` is a dense tensor on a device of the backend."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(
            "expected a tensor",
            op=op,
            seen=f"got {type(tensor).__name__}",
            fix="Pass a torch.Tensor.",
        )
    if tensor.layout is not torch.strided:
        raise DeviceError(
            f"the tensor has layout {tensor.layout}",
            op=op,
            fix="Only all_reduce takes sparse (COO) tensors, with SUM; use .to_dense() elsewhere.",
        )
    if tensor.device.type not in device_types:
        raise DeviceError(
            f"the tensor is on {tensor.device}",
            op=op,
            seen=f"this group's backend takes tensors on {', '.join(sorted(device_types))}",
            fix="Move it with .to(...), or create the group with a backend for that device.",
        )
    if tensor.is_quantized:
        raise DtypeError(
            f"cannot move {tensor.dtype}",
            op=op,
            seen=f"allowed: {_BYTE_ADDRESSABLE}",
            fix="Send .int_repr() with its scale and zero point.",
        )


def check_list(tensors: object, size: int, op: str, what: str) -> Sequence[torch.Tensor]:
    """Return `tensors` as a sequence of `size` tensors, or raise."""
    if not isinstance(tensors, (list, tuple)):
        raise UsageError(
            f"{what} must be a list of tensors", op=op, seen=f"got {type(tensors).__name__}"
        )
    if len(tensors) != size:  # pyright: ignore[reportUnknownArgumentType]
        raise ShapeError(
            f"{what} has the wrong length",
            op=op,
            seen=f"{len(tensors)} tensors for a group of {size} ranks",  # pyright: ignore[reportUnknownArgumentType]
            fix="Give one tensor for each rank.",
        )
    return tensors  # pyright: ignore[reportUnknownVariableType]


def check_same_dtype(tensors: Sequence[torch.Tensor], dtype: torch.dtype, op: str) -> None:
    """Raise unless all `tensors` have `dtype`."""
    for i, t in enumerate(tensors):
        if t.dtype is not dtype:
            raise DtypeError(
                "the tensors of one call must have one dtype",
                op=op,
                seen=f"tensor {i} is {t.dtype}, the other side {dtype}",
            )


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a contiguous copy of it."""
    if _is_plain(tensor):
        return tensor.detach()
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor.detach())


def writable(tensor: torch.Tensor, *, load: bool, op: str) -> tuple[torch.Tensor, Finish | None]:
    """Return memory to write for `tensor`, and what copies it back if it is not its own.

    Args:
        tensor: The user's output.
        load: Whether the operation also reads it (all_reduce, broadcast).
        op: Name of the operation, for errors.
    """
    if _is_plain(tensor):
        return tensor.detach(), None
    target = tensor.detach()
    if any(n > 1 and s == 0 for n, s in zip(target.shape, target.stride(), strict=True)):
        raise ShapeError(
            "elements of the output share memory",
            op=op,
            seen=f"shape {tuple(target.shape)} with strides {tuple(target.stride())}",
            fix="Use .clone() or .contiguous() before the call.",
        )
    memory = torch.empty_like(target, memory_format=torch.contiguous_format)
    if load:
        memory.copy_(target)
    return memory, copy_back(target, memory)


def copy_back(target: torch.Tensor, memory: torch.Tensor) -> Finish:
    """Return what copies `memory` to the user's `target`."""
    target = target.detach()

    def copy() -> None:
        target.copy_(memory)

    return copy


def run_all(finishes: Sequence[Finish | None]) -> Finish | None:
    """Chain what is not None."""
    todo = [f for f in finishes if f is not None]
    if not todo:
        return None

    def run() -> None:
        for f in todo:
            f()

    return run


def as_splits(splits: Sequence[int] | None, op: str, what: str) -> list[int]:
    """Return split sizes (None, a sequence, an array) as plain ints; empty for equal parts."""
    try:
        return [] if splits is None else [operator.index(s) for s in splits]
    except TypeError:
        raise UsageError(
            f"{what}_split_sizes must be a list of whole numbers", op=op, seen=f"got {splits!r}"
        ) from None


def split_bounds(
    tensor: torch.Tensor, splits: Sequence[int], size: int, op: str, what: str
) -> list[int]:
    """Return how many elements of `tensor` belong to each rank.

    Args:
        tensor: Split along dimension 0.
        splits: Rows for each rank; empty for equal parts.
        size: Ranks.
        op: Name of the operation, for errors.
        what: Name of the argument, for errors.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    per_row = tensor.numel() // rows if rows else 0
    if not splits:
        if rows % size:
            raise ShapeError(
                f"the {what} tensor does not divide by the number of ranks",
                op=op,
                seen=f"{rows} rows for {size} ranks",
                fix=f"Give {what}_split_sizes.",
            )
        return [rows // size * per_row] * size
    if len(splits) != size or any(s < 0 for s in splits) or sum(splits) != rows:
        raise ShapeError(
            f"{what}_split_sizes do not fit the {what} tensor",
            op=op,
            seen=f"{list(splits)} for {rows} rows and {size} ranks",
            fix="One number of rows for each rank; they must add up to dimension 0.",
        )
    return [s * per_row for s in splits]
