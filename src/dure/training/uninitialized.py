"""Parameters and buffers from `to_empty` that are used before they were written.

A model that is made on the meta device gets memory from `to_empty`, and values from a checkpoint or
from its `reset_parameters`. A tensor that both leave out, often a non-persistent buffer, would have
arbitrary values. So its bytes are set to a pattern, not a number in floating-point dtypes,
and looked for when the first forward begins: however a value was written, it is not the pattern.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager

import torch
from torch import nn

from dure.errors import ModuleError
from dure.training.grad_views import own_part

__all__ = ["check_has_memory", "check_initialized", "marking"]

_NAN, _ODD = 0xFF, 0xA5  # bytes: NaN of every floating-point dtype; no likely integer
_MARK = "_dure_uninitialized"


@contextmanager
def marking(module: nn.Module) -> Iterator[None]:
    """Mark what a block gives memory to that was on the meta device before."""
    on_meta = [
        (inner, name)
        for inner in module.modules()
        for name, tensor in _tensors_of(inner)
        if own_part(tensor).is_meta
    ]
    yield
    for inner, name in on_meta:
        local = own_part(dict(_tensors_of(inner))[name]).detach()
        if not local.is_meta and type(local) in (torch.Tensor, nn.Parameter):
            local.untyped_storage().fill_(_pattern(local))  # pyright: ignore
            inner.__dict__.setdefault(_MARK, set()).add(name)


def check_has_memory(modules: Sequence[nn.Module], managed: Set[object]) -> None:
    """Raise if a managed parameter of modules is on the meta device.

    Raises:
        ModuleError: Lists those that are.
    """
    on_meta = [
        name
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter in managed and own_part(parameter).is_meta
    ]
    if on_meta:
        raise ModuleError(
            "parameters are still on the meta device",
            op="forward",
            parameters=tuple(on_meta),
            seen=", ".join(on_meta),
            fix="Call to_empty(device=...) on the model, and then reset_parameters() on its "
            "modules; or load_state_dict(..., assign=True).",
        )


def check_initialized(modules: Sequence[nn.Module]) -> None:
    """Raise if memory that was marked has not been written since.

    Raises:
        ModuleError: Lists what was not.
    """
    unwritten: list[str] = []
    for module in modules:
        for path, inner in module.named_modules():
            tensors = dict(_tensors_of(inner))
            names = [n for n in sorted(inner.__dict__.get(_MARK, ())) if n in tensors]
            bad = [name for name in names if _has_pattern(own_part(tensors[name]).detach())]
            unwritten += [f"{path}.{name}" if path else name for name in bad]
    if unwritten:
        raise ModuleError(
            "to_empty gave these memory, and no value was written to them",
            op="forward",
            parameters=tuple(unwritten),
            seen=", ".join(unwritten),
            fix="Load them from a checkpoint, or have their module's reset_parameters() write them "
            "(buffers that are not persistent, too).",
        )
    for module in modules:
        for inner in module.modules():
            inner.__dict__.pop(_MARK, None)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the module's own parameters and buffers, by name."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _pattern(local: torch.Tensor) -> int:
    return _NAN if local.is_floating_point() or local.is_complex() else _ODD


def _has_pattern(local: torch.Tensor) -> bool:
    """Tell whether all bytes are the pattern; a bool has two values only, and is never asked."""
    if local.numel() == 0 or local.dtype == torch.bool:
        return False
    content = local.contiguous().view(-1).view(torch.uint8)
    pattern = _pattern(local)
    return int(content[0]) == pattern and bool((content == pattern).all())
