"""Tensors in pytrees: batches, arguments and results of nested sequences, mappings, dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch

__all__ = ["cast_floats", "has_unknown_parts", "mapped", "moved", "tensors_of"]

_PLAIN = (torch.Tensor, type(None), int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types of leaves that hold no tensor but themselves."""


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Go through the tensors of a batch or an output: nested sequences, mappings, dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for part in _parts_of(value) or ():
        yield from tensors_of(part)


def has_unknown_parts(value: object) -> bool:
    """Return whether `value` has parts that may hold tensors which `tensors_of` does not see."""
    if isinstance(value, _PLAIN):
        return False
    parts = _parts_of(value)
    return parts is None or any(map(has_unknown_parts, parts))


def _parts_of(value: object) -> Iterable[object] | None:
    """Return the parts of a sequence, mapping or dataclass; None for anything else."""
    if isinstance(value, Mapping):
        return cast("Mapping[object, object]", value).values()
    if isinstance(value, list | tuple | set):
        return cast("Iterable[object]", value)
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return None


def moved(value: Any, device: torch.device) -> Any:
    """Return `value` with the tensors in it moved to `device` (Any: any pytree)."""
    return mapped(value, lambda tensor: tensor.to(device))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with the floating-point tensors in it in `dtype` (Any: any pytree)."""
    return mapped(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with `change` applied to the tensors in it (Any: any pytree)."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, change) for v in value))  # pyright: ignore
    if isinstance(value, list | tuple):
        return type(value)(mapped(v, change) for v in value)  # pyright: ignore
    if isinstance(value, dict):
        same: dict[Any, Any] = copy(value)  # of the same class, whatever its constructor takes
        same.update((k, mapped(v, change)) for k, v in value.items())
        return same
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.init]
        return replace(value, **{n: mapped(getattr(value, n), change) for n in names})
    return value
