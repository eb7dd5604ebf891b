"""Torch's optimizers over DTensors: their updates run on the parts, once for a whole step.

Each optimizer of `torch.optim` hands its parameters, gradients and state as lists to one function,
such as ``torch.optim.adam.adam``, which computes element by element in the form that was asked for:
a loop, lists (`foreach`) or one kernel (`fused`). Torch lets no tensor take part in the choice of
that function. So this file puts one in its place that takes the parts out of DTensors that lie
alike, updates these as plain tensors, and raises the versions of what was written. What does not
lie alike, terms of sums, scaled gradients and updates that autograd follows go the way of any
operator (rules/foreach.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from dure.comm.untraced import untraced_below
from dure.tensor.dtensor import DTensor, parts_of, wrap
from dure.tensor.spec import DTensorSpec, TensorMeta, spec_of

__all__ = ["on_parts"]

_OPTIMIZERS = (
    "adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd",
)  # fmt: skip
"""Modules of `torch.optim`, and the functions in them, that compute element by element."""

_Specs = list[DTensorSpec | None]


def on_parts(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return an update that runs on the parts of DTensors, where these lie alike.

    Args:
        update: Takes lists first: parameters, gradients, and of each kind of state. It writes all
            but the gradients, and puts new tensors in place of None.
    """

    @functools.wraps(update)
    def run(*args: Any, **options: Any) -> Any:
        if not args or DTensor not in {*map(type, args[0])} or torch.is_grad_enabled():
            return update(*args, **options)
        return _updated(update, args, options)

    return run


@untraced_below
def _updated(update: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    count = sum(type(arg) is list for arg in args)
    lists, rest = args[:count], args[count:]
    specs: _Specs = [t.spec if type(t) is DTensor else None for t in args[0]]
    parts = [_parts(given, specs) for given in lists]
    scaled = options.get("grad_scale") is not None  # then gradients are written
    beside = DTensor in {*map(type, rest), *map(type, options.values())}
    if None in parts or scaled or beside or not all(map(_is_part, {*specs})):
        return update(*args, **options)
    result = update(*parts, *rest, **options)
    written = [t for given in (lists[0], *lists[2:]) for t in given if type(t) is DTensor]
    torch.autograd.graph.increment_version(written)
    for given, now in zip(lists, parts, strict=True):
        if type(None) in {*map(type, given)}:
            given[:] = _with_new(given, now or [], specs)
    return result


def _is_part(spec: DTensorSpec | None) -> bool:
    """Tell whether this rank has a part of such a tensor, and not a term; plain ones are fine."""
    return spec is None or not (spec.partial or spec.coordinate is None)


def _parts(given: Any, specs: _Specs) -> list[Any] | None:
    """Return the parts of tensors that lie as `specs` say; None if one does not.

    Plain tensors stand for plain parameters, or are counts, such as of steps.
    """
    if type(given) is not list or len(given) not in (0, len(specs)):
        return None
    found = parts_of(given, specs) if given else []
    if found is not None:
        return found
    lie: _Specs = []
    for tensor, spec in zip(given, specs, strict=True):
        if type(tensor) is DTensor:
            lie.append(tensor.spec if spec is not None and _alike(tensor.spec, spec) else None)
        elif tensor is None or tensor.ndim == 0 or spec is None:
            lie.append(None)
        else:
            return None
    return parts_of(given, lie)


def _alike(one: DTensorSpec, other: DTensorSpec) -> bool:
    """Tell whether the parts have the same elements of the whole."""
    same = one is other or (one.mesh is other.mesh and one.placements == other.placements)
    return same and one.shape == other.shape


def _with_new(given: Sequence[Any], now: Sequence[Any], specs: _Specs) -> list[Any]:
    """Return an optimizer's list with the state that the update made, lying as its parameter."""
    made: list[Any] = []
    for before, after, spec in zip(given, now, specs, strict=True):
        if before is None and after is not None and spec is not None:
            meta = TensorMeta(spec.meta.shape, spec.meta.stride, after.dtype)
            made.append(wrap(after, spec_of(spec.mesh, spec.placements, meta)))
        else:
            made.append(after if before is None else before)
    return made


for _name in _OPTIMIZERS:
    _module = import_module(f"torch.optim.{_name}")
    setattr(_module, _name, on_parts(getattr(_module, _name)))
