"""Cutting a batch into parts, and joining the parts of a result.

Every tensor in the arguments is cut along `dim`, into as many parts as `Tensor.chunk` makes; all
else, and tensors without dimensions, goes to each part as it is. Tensors that would make different
numbers of parts are refused: pairing them up would drop rows of the longer ones without a word.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch

from dure.errors import ShapeError, UsageError, UsageWarning
from dure.parallel.dp.devices import Device, as_device, as_devices
from dure.training.pytrees import mapped, tensors_of

__all__ = ["gather", "scatter", "scatter_kwargs"]


def scatter(inputs: Any, target_gpus: int | Sequence[Device], dim: int = 0) -> Any:
    """Cut the tensors in `inputs` into parts, one for each device at most.

    Args:
        inputs: A tensor, or any pytree of sequences, mappings and dataclasses.
        target_gpus: The devices; numbers are GPUs. A single number is so many threads on the CPU.
        dim: The dimension that is cut.

    Returns:
        One pytree for each part: a tuple of tensors for a tensor, else a list.

    Raises:
        ShapeError: The tensors do not make the same number of parts.
    """
    devices = as_devices(target_gpus, _kind_of(inputs))
    cuts: dict[int, tuple[torch.Tensor, ...]] = {}
    for tensor in tensors_of(inputs):
        if tensor.dim() > 0 and id(tensor) not in cuts:
            cuts[id(tensor)] = _cut(tensor, len(devices), dim)
    counts = {len(parts) for parts in cuts.values()}
    if len(counts) > 1:
        raise _uneven(inputs, len(devices), dim)
    count = counts.pop() if counts else len(devices)

    def part(i: int) -> Any:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return (cuts[id(tensor)][i] if id(tensor) in cuts else tensor).to(devices[i])

        return mapped(inputs, cut, copies=True)

    parts = [part(i) for i in range(count)]
    return tuple(parts) if isinstance(inputs, torch.Tensor) else parts


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: int | Sequence[Device],
    dim: int = 0,
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Cut positional and keyword arguments; see `scatter`."""
    if not inputs and not kwargs:
        return (), ()
    parts = scatter((tuple(inputs), dict(kwargs or {})), target_gpus, dim)
    return tuple(p[0] for p in parts), tuple(p[1] for p in parts)


def _kind_of(inputs: object) -> str:
    """Return what kind of device a number means: a GPU if one is available."""
    on_gpu = torch.cuda.is_available() or any(t.is_cuda for t in tensors_of(inputs))
    return "cuda" if on_gpu else "cpu"


def _cut(tensor: torch.Tensor, count: int, dim: int) -> tuple[torch.Tensor, ...]:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ShapeError(
            "a tensor has no such dimension to be split along",
            seen=f"dim={dim} and a tensor of shape {list(tensor.shape)}",
            fix="Give every tensor argument a batch dimension, or pass it as a buffer.",
        )
    return tensor.chunk(count, dim)


def _uneven(inputs: object, count: int, dim: int) -> ShapeError:
    shapes = [str(list(t.shape)) for t in tensors_of(inputs)]
    return ShapeError(
        "the arguments cannot be split into the same number of parts",
        seen=f"tensors of shapes {', '.join(shapes)}, to be split along dim {dim} over {count}",
        fix="Give all of them the same batch size; a tensor that is not of the batch may have no "
        "dimensions, or be expanded.",
    )


def gather(outputs: Sequence[Any], target_device: Device, dim: int = 0) -> Any:
    """Join the results of the parts: tensors are concatenated, pytrees are joined leaf by leaf.

    Tensors without dimensions become a vector of one element a part, with a warning.

    Args:
        outputs: One result per part, all of the same structure.
        target_device: Where the joined tensors shall be; -1 is the CPU.
        dim: The dimension along which they are concatenated.

    Raises:
        UsageError: The results differ in structure, or hold something that cannot be joined.
    """
    device = as_device(target_device, _kind_of(list(outputs)))
    return _joined(list(outputs), device, dim, "output")


def _joined(outputs: list[Any], device: torch.device, dim: int, where: str) -> Any:
    first = outputs[0]
    if any(type(o) is not type(first) for o in outputs) and not _are_tensors(outputs):
        raise _unlike(where, ", ".join(type(o).__name__ for o in outputs))
    if isinstance(first, torch.Tensor):
        return _concatenated(outputs, device, dim)
    if first is None:
        return None
    if isinstance(first, Mapping):
        return _joined_mappings(outputs, device, dim, where)
    if isinstance(first, list | tuple):
        return _joined_sequences(cast("list[Sequence[Any]]", outputs), device, dim, where)
    if is_dataclass(first) and not isinstance(first, type):
        names = [f.name for f in fields(first) if f.init]
        parts = {n: [getattr(o, n) for o in outputs] for n in names}
        return replace(
            first, **{n: _joined(p, device, dim, f"{where}.{n}") for n, p in parts.items()}
        )
    raise UsageError(
        "a module's output cannot be put together from its parts",
        seen=f"{where} is of type {type(first).__name__}",
        fix="Return tensors, in sequences, mappings or dataclasses.",
    )


def _are_tensors(outputs: Sequence[object]) -> bool:
    return all(isinstance(o, torch.Tensor) for o in outputs)


def _concatenated(tensors: list[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    if all(t.dim() == 0 for t in tensors):
        warnings.warn(
            "DataParallel's module returned tensors without dimensions: the result is a vector "
            "with one element for each part of the batch, which is not their mean.",
            UsageWarning,
            stacklevel=2,
        )
        tensors = [t.reshape(1) for t in tensors]
        dim = 0
    return torch.cat([t.to(device) for t in tensors], dim)


def _joined_mappings(outputs: list[Any], device: torch.device, dim: int, where: str) -> Any:
    first = outputs[0]
    if any(o.keys() != first.keys() for o in outputs):
        raise _unlike(where, " and ".join(str(list(o)) for o in outputs))
    same = copy(first)  # of the same class, without calling its constructor
    for key in first:
        same[key] = _joined([o[key] for o in outputs], device, dim, f"{where}[{key!r}]")
    return same


def _joined_sequences(
    outputs: list[Sequence[Any]], device: torch.device, dim: int, where: str
) -> Any:
    first = outputs[0]
    if any(len(o) != len(first) for o in outputs):
        raise _unlike(where, ", ".join(f"{len(o)} items" for o in outputs))
    items = [
        _joined([o[i] for o in outputs], device, dim, f"{where}[{i}]") for i in range(len(first))
    ]
    make: Any = type(first)  # Any: a sequence's own constructor
    return make(*items) if hasattr(first, "_fields") else make(items)


def _unlike(where: str, seen: str) -> UsageError:
    return UsageError(
        "the parts of a batch gave results of different structure",
        seen=f"{where}: {seen}",
        fix="Return the same structure for every part of a batch.",
    )
