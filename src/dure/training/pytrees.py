"""Tensors in pytrees: batches, arguments and results of nested sequences, mappings, dataclasses."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from operator import is_
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
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, name) for name in _fields_of(value)]
    return None


def _fields_of(value: Any) -> list[str]:
    """Return the fields of a dataclass that have a value."""
    return [field.name for field in fields(value) if hasattr(value, field.name)]


def moved(value: Any, device: torch.device) -> Any:
    """Return `value` with the tensors in it moved to `device`."""
    return mapped(value, lambda tensor: tensor.to(device))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with the floating-point tensors in it in `dtype`."""
    return mapped(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def mapped(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], *, copies: bool = False
) -> Any:
    """Return `value` with `change` applied to the tensors in it.

    Args:
        value: Is not written to.
        change: Returns another tensor, or the same.
        copies: Copy all containers. If False, those in which no tensor changes are returned as they
            are, so that what a module writes into them reaches its caller.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = cast("list[object] | tuple[object, ...]", value)
        new = [mapped(item, change, copies=copies) for item in items]
        if not copies and all(map(is_, new, items)):
            return value
        if hasattr(value, "_fields"):
            return type(value)._make(new)  # pyright: ignore
        return type(value)(new)  # pyright: ignore
    if isinstance(value, dict | UserDict):
        return _mapped_dict(cast("dict[Any, Any]", value), change, copies)
    if is_dataclass(value) and not isinstance(value, type):
        return _mapped_fields(value, change, copies)
    return value


def _mapped_dict(
    value: dict[Any, Any], change: Callable[[torch.Tensor], torch.Tensor], copies: bool
) -> dict[Any, Any]:
    new = {key: mapped(item, change, copies=copies) for key, item in value.items()}
    changed = {key: item for key, item in new.items() if item is not value[key]}
    if not changed and not copies:
        return value
    same = copy(value)  # of the same class, without calling its constructor
    attributes: dict[str, Any] = getattr(same, "__dict__", {})
    for key, item in changed.items():  # not `update`, which some classes refuse
        for name, attribute in attributes.items():
            if attribute is value[key]:  # such as the fields of transformers' `ModelOutput`
                attributes[name] = item
        same[key] = item
    return same


def _mapped_fields(value: Any, change: Callable[[torch.Tensor], torch.Tensor], copies: bool) -> Any:
    """Return a dataclass; without a call of its constructor, which may do something else again."""
    new = {n: mapped(getattr(value, n), change, copies=copies) for n in _fields_of(value)}
    changed = {name: item for name, item in new.items() if item is not getattr(value, name)}
    if not changed and not copies:
        return value
    same = copy(value)
    for name, item in changed.items():
        object.__setattr__(same, name, item)  # also of a frozen one
    return same
