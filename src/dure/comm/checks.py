"""Checks of a call that need only this rank, and copies of tensors that are not contiguous.

Backends only take dense contiguous tensors. `plain_call` passes contiguous tensors unchanged and
copies others; results are copied back once the operation has ended. Inputs that partly overlap an
output are copied, too (see `comm.overlap`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch

from dure import native
from dure.comm import overlap
from dure.comm.backends.request import used_in_stream
from dure.comm.call import Call
from dure.comm.ops import CONVERSIONS, ReduceOp, check_reducible
from dure.errors import DeviceError, DtypeError, ShapeError, UsageError
from dure.store.arguments import duration_of

Finish = Callable[[], None]

_NUM_TAGS = 0x7FFFFFF0
"""The tags that programs may use; backends reserve the higher ones of 31 bits."""
_ONE_A_RANK: dict[str, tuple[str, ...]] = {
    "all_gather": ("outputs",),
    "gather": ("outputs",),
    "scatter": ("inputs",),
    "reduce_scatter": ("inputs",),
    "all_to_all": ("inputs", "outputs"),
}
"""The lists with one tensor per rank; names that end in _single have one tensor with the parts."""
_IN_PLACE = ("all_reduce", "reduce", "broadcast")


def duration(timeout: timedelta | float, op: str = "") -> timedelta:
    """Return a timeout as a timedelta; infinity is a century."""
    try:
        return duration_of(timeout, op)
    except TypeError:
        raise UsageError(
            "the timeout must be a datetime.timedelta, or a number of seconds",
            op=op,
            seen=f"got {timeout!r}",
            fix="Write timedelta(seconds=30).",
        ) from None


def check_tensor(tensor: object, op: str, device_types: frozenset[str]) -> None:
    """Raise unless `tensor` is a dense tensor on a device of the backend."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(
            "expected a tensor",
            op=op,
            seen=f"got {type(tensor).__name__}",
            fix="Pass a torch.Tensor.",
        )
    if type(tensor) not in _PLAIN_TYPES:
        check_memory(tensor, op)
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
            seen="allowed: every dtype of torch but the quantized ones",
            fix="Send .int_repr() with its scale and zero point.",
        )


_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}


def check_memory(tensor: torch.Tensor, op: str) -> None:
    """Raise if a tensor is made of other tensors, as a DTensor is, and has no memory of its own."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return
    name = type(tensor).__name__
    if hasattr(tensor, "to_local"):
        raise UsageError(
            f"the tensor is a {name}, of which each rank has a part",
            op=op,
            seen=f"{name} {list(tensor.shape)}",
            fix="Pass this rank's part, t.to_local(); or move the tensor with t.redistribute().",
        )
    with suppress(RuntimeError):  # the storage has no memory
        tensor.untyped_storage().data_ptr()
        return
    inner, _ = tensor.__tensor_flatten__()  # pyright: ignore
    raise UsageError(
        f"the tensor is a {name}, which is made of other tensors and has no memory of its own",
        op=op,
        seen=f"{name} {list(tensor.shape)}",
        fix=f"Call {op} for each of its tensors: {', '.join(f't.{one}' for one in inner)}.",
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


def check_lists(call: Call, rank: int, size: int) -> None:
    """Raise unless lists with one tensor per rank are passed by the ranks that need them."""
    for side in _ONE_A_RANK.get(call.op, ()):
        tensors = getattr(call, side)
        if call.root in (-1, rank):
            check_list(tensors, size, call.op, f"the list of {side}")
        elif not isinstance(tensors, (list, tuple)) or tensors:
            raise UsageError(
                f"the list of {side} was passed on a rank that is not the root",
                op=call.op,
                seen=f"the root is rank {call.root} of the group",
                fix="Pass None (or an empty list) on this rank.",
            )


def check_call(call: Call, rank: int, size: int) -> None:
    """Raise unless the arguments of a call match, as far as this rank alone can know.

    All tensors have one dtype, unless a reduce_scatter converts; the reduction is defined for it;
    the part that this rank sends to itself has the length of the part that it receives from itself.
    """
    inputs, outputs, reduction = call.inputs, call.outputs, call.reduction
    if call.peer == rank:
        raise UsageError(
            "a rank cannot send to or receive from itself",
            op=call.op,
            fix="Copy the tensor instead.",
        )
    if not 0 <= call.tag < _NUM_TAGS:
        raise UsageError(
            f"the tag must be between 0 and {_NUM_TAGS - 1}", op=call.op, seen=f"{call.tag}"
        )
    if reduction is not None:
        check_reducible(inputs[0].dtype, reduction, call.op)
    if inputs is outputs:  # in place
        return
    dtype = call.dtype
    for t in (*inputs, *outputs):
        if t.dtype is not dtype and not _converts(call):
            raise DtypeError(
                "the tensors of one call must have one dtype",
                op=call.op,
                seen=f"inputs {[t.dtype for t in inputs]}, outputs {[t.dtype for t in outputs]}",
            )
    sides = _ONE_A_RANK.get(call.kind)
    if sides is None or not (inputs and outputs):
        return
    gives = _own(inputs, "inputs" in sides, call, rank, size)
    takes = _own(outputs, "outputs" in sides, call, rank, size)
    if gives != takes:
        raise ShapeError(
            "input and output lengths do not match",
            op=call.op,
            seen=f"inputs of {[t.numel() for t in inputs]} elements, outputs of "
            f"{[t.numel() for t in outputs]}, for {size} ranks: this rank sends itself "
            f"{gives / size:g} and receives {takes / size:g}",
        )


def _own(
    tensors: Sequence[torch.Tensor], one_a_rank: bool, call: Call, rank: int, size: int
) -> int:
    """Return the length of this rank's own part in n-ths of an element, to avoid rounding."""
    if one_a_rank and call.single:
        return tensors[0].numel()
    return size * tensors[rank if one_a_rank else 0].numel()


def _converts(call: Call) -> bool:
    """Return whether a call may reduce into another dtype than that of its input."""
    return (
        call.op == "reduce_scatter_single"
        and call.reduction is not None
        and call.reduction.name in ("SUM", "AVG", "PREMUL_SUM")
        and (call.inputs[0].dtype, call.outputs[0].dtype) in CONVERSIONS
    )


def plain_call(
    call: Call, rank: int, size: int, channel: int, fuses: bool
) -> tuple[Call, Finish | None]:
    """Return a checked call on plain memory, and a function that copies its results back.

    Args:
        call: On the user's tensors.
        rank: This rank.
        size: Number of ranks.
        channel: The group's channel that runs it.
        fuses: Whether the backend takes premultiplied sums and conversions. Else inputs are scaled
            copies, and sums that convert are taken in float32.
    """
    reduction, factor = call.reduction, None
    if reduction is not None and reduction.name == "PREMUL_SUM":
        factor = reduction.checked_factor(call.op)
        if fuses and not isinstance(factor, torch.Tensor):
            factor = None
        else:
            reduction = ReduceOp.SUM
    if call.op in _IN_PLACE:
        memory, finish = _in_place(call, rank, factor)
        inputs = outputs = (memory,)
    else:
        inputs, outputs, finish = _apart(call, factor, fuses)
        inputs = overlap.separated(call, inputs, outputs, rank, size)
    plain = Call(
        op=call.op,
        inputs=inputs,
        outputs=outputs,
        reduction=reduction,
        root=call.root,
        peer=call.peer,
        tag=call.tag,
        nbytes=call.nbytes,
        channel=channel,
        subject=native.subject(),
    )
    return plain, finish


def _in_place(
    call: Call, rank: int, factor: float | torch.Tensor | None
) -> tuple[torch.Tensor, Finish | None]:
    (tensor,), reduces = call.outputs, call.reduction is not None
    if call.root >= 0 and (rank == call.root) != reduces:
        return readable(_scaled(tensor, factor)), None  # this rank does not write
    memory, finish = writable(tensor, load=reduces, op=call.op)
    if factor is None:
        return memory, finish
    memory = _scaled(memory, factor)
    return memory, copy_back(tensor, memory)


def _apart(
    call: Call, factor: float | torch.Tensor | None, fuses: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], Finish | None]:
    inputs, outputs = call.inputs, call.outputs
    memory: list[torch.Tensor] = []
    finishes: list[Finish] = []
    for t in outputs:
        plain, finish = writable(t, load=False, op=call.op)
        memory.append(plain)
        if finish is not None:
            finishes.append(finish)
    if not fuses and inputs and outputs and inputs[0].dtype is not outputs[0].dtype:
        inputs = [t.detach().float() for t in inputs]
        memory = [torch.empty(outputs[0].shape, dtype=torch.float32, device=outputs[0].device)]
        finishes = [copy_back(outputs[0], memory[0])]
    if factor is not None:
        inputs = [_scaled(t, factor) for t in inputs]
    sources = [readable(t) for t in inputs]
    return sources, memory, partial(_run_all, finishes) if finishes else None


def _scaled(tensor: torch.Tensor, factor: float | torch.Tensor | None) -> torch.Tensor:
    return tensor if factor is None else (tensor.detach() * factor).to(tensor.dtype)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def parts_first(tensor: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """Return a view of a tensor in which its `n` equal parts along `dim` follow one another.

    It is contiguous if `dim` is 0. Otherwise a call copies it once, for any number of parts.
    """
    if dim == 0:
        return tensor
    parts = tensor.detach().unflatten(dim, (n, tensor.shape[dim] // n))
    return parts.movedim(dim, 0)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a contiguous copy of it."""
    if _is_plain(tensor):
        return tensor.detach()  # the user's object may become a pending tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor.detach())


def writable(tensor: torch.Tensor, *, load: bool, op: str) -> tuple[torch.Tensor, Finish | None]:
    """Return memory to write for `tensor`, and a function that copies it back if needed.

    Args:
        tensor: The user's output.
        load: Whether the operation also reads it (all_reduce, broadcast).
        op: Name of the operation, for errors.
    """
    if _is_plain(tensor):
        return tensor.detach(), None
    target = tensor.detach()
    if any(n > 1 and step == 0 for n, step in zip(target.shape, target.stride(), strict=True)):
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
    """Return a function that copies `memory` to the user's `target`."""
    target = target.detach()

    def copy() -> None:
        used_in_stream(memory)
        target.copy_(memory)

    return copy


def _run_all(finishes: Sequence[Finish]) -> None:
    for finish in finishes:
        finish()


def as_splits(splits: Sequence[int] | None, op: str, what: str) -> list[int]:
    """Return split sizes (None, a sequence, an array) as plain ints; empty for equal parts."""
    try:
        return [] if splits is None else [operator.index(s) for s in splits]
    except TypeError:
        raise UsageError(
            f"{what}_split_sizes must be a list of integers", op=op, seen=f"got {splits!r}"
        ) from None


def split_rows(
    tensor: torch.Tensor, given: Sequence[int] | None, size: int, op: str, what: str
) -> list[int]:
    """Return how many rows (of dimension 0) of `tensor` belong to each rank; see `as_splits`."""
    splits, rows = as_splits(given, op, what), tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ShapeError(
                f"the {what} tensor does not divide by the number of ranks",
                op=op,
                seen=f"{rows} rows for {size} ranks",
                fix=f"Pass {what}_split_sizes.",
            )
        return [rows // size] * size
    if len(splits) != size or any(s < 0 for s in splits) or sum(splits) != rows:
        raise ShapeError(
            f"{what}_split_sizes do not match the {what} tensor",
            op=op,
            seen=f"{splits} for {rows} rows and {size} ranks",
            fix="Pass one number of rows for each rank; they must add up to dimension 0.",
        )
    return splits
