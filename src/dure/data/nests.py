"""Tensors inside nests of batches, arguments and results: sequences, mappings, dataclasses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch

__all__ = ["moved", "tensors_of"]


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Go through the tensors of a batch or an output: nested sequences, mappings, dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts: Iterable[object] = ()
    if isinstance(value, Mapping):
        parts = cast("Mapping[object, object]", value).values()
    elif isinstance(value, list | tuple | set):
        parts = cast("Iterable[object]", value)
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    for part in parts:
        yield from tensors_of(part)


def moved(value: Any, device: torch.device) -> Any:
    """Return `value` with the tensors in it moved to `device` (Any: any nest of arguments)."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(v, device) for v in value))  # pyright: ignore
    if isinstance(value, list | tuple):
        return type(value)(moved(v, device) for v in value)  # pyright: ignore
    if isinstance(value, dict):
        return {k: moved(v, device) for k, v in value.items()}  # pyright: ignore
    return value
