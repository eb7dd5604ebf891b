"""Torch's optimizers over DTensors: their updates run on the parts, once for a whole step.

Each optimizer of `torch.optim` hands its parameters, gradients and state as lists to one function,
such as ``torch.optim.adam.adam``, which computes element by element in the form that was asked for:
a loop, lists (`foreach`) or one kernel (`fused`). Torch lets no tensor take part in the choice of
that function. So this file puts one in its place that takes the parts out of DTensors that lie
alike, updates these as plain tensors, and raises the versions of what was written. Gradients are
brought to where their parameters lie. What else does not lie alike, terms of sums and updates that
autograd follows go the way of any operator (rules/foreach.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from dure.comm.untraced import untraced_below
from dure.tensor.dtensor import DTensor, to_target, wrap
from dure.tensor.rules.foreach import Specs, are_parts, number, parts_like
from dure.tensor.spec import DTensorSpec
from dure.tensor.strides import stored_like, with_equal_strides, write_back

__all__ = ["on_parts"]

_OPTIMIZERS = (
    "adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd",
)  # fmt: skip
"""Modules of `torch.optim`, and the functions in them, that compute element by element."""


def on_parts(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return an update that runs on the parts of DTensors, where these lie alike.

    Args:
        update: Takes lists first: parameters, gradients, and of each kind of state. It writes all
            but the gradients, and puts new tensors in place of None.
    """
    names = [*inspect.signature(update).parameters]

    @functools.wraps(update)
    def run(*args: Any, **options: Any) -> Any:
        if not args or DTensor not in {*map(type, args[0])} or torch.is_grad_enabled():
            return update(*args, **options)
        return _updated(update, args, options, {**dict(zip(names, args, strict=False)), **options})

    return run


@untraced_below
def _updated(
    update: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    named: dict[str, Any],
) -> Any:
    count = sum(type(arg) is list for arg in args)
    lists, rest, plain = args[:count], args[count:], options
    if DTensor in {*map(type, rest), *map(type, options.values())}:  # a learning rate, say
        rest = tuple(map(number, rest))
        plain = {name: number(option) for name, option in options.items()}
    specs: Specs = [t.spec if type(t) is DTensor else None for t in args[0]]
    found: list[list[Any] | None] = []
    if are_parts(specs):
        found = [parts_like(given, specs) for given in lists]
        if found[1] is None:
            found[1] = parts_like([*map(_beside, lists[1], specs)], specs)
    parts = [each for each in found if each is not None]
    if len(parts) < count:
        return update(*args, **options)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    if named.get("fused"):
        parts, copies = with_equal_strides(parts)
    result = update(*parts, *rest, **plain)
    write_back(copies)
    unscaled = lists[1] if named.get("grad_scale") is not None else []
    written = [t for given in (lists[0], unscaled, *lists[2:]) for t in given]
    torch.autograd.graph.increment_version([t for t in written if type(t) is DTensor])
    for given, now in zip(lists, parts, strict=True):
        if type(None) in {*map(type, given)}:
            given[:] = _with_new(given, now, parts[0], specs)
    return result


def _beside(grad: Any, spec: DTensorSpec | None) -> Any:
    """Return a gradient that lies as its parameter does, if both are of one mesh."""
    if type(grad) is not DTensor or spec is None or grad.device_mesh != spec.mesh:
        return grad
    return to_target(grad, grad.spec.with_placements(spec.placements))


def _with_new(
    given: Sequence[Any], now: Sequence[Any], parameters: Sequence[Any], specs: Specs
) -> list[Any]:
    """Return an optimizer's list with the state that the update made, laid out as its parameter."""
    made: list[Any] = []
    for before, after, parameter, spec in zip(given, now, parameters, specs, strict=True):
        if before is None and after is not None and spec is not None:
            own = spec.compact().with_dtype(after.dtype)
            made.append(wrap(stored_like(after, parameter), own))
        else:
            made.append(after if before is None else before)
    return made


for _name in _OPTIMIZERS:
    _module = import_module(f"torch.optim.{_name}")
    setattr(_module, _name, on_parts(getattr(_module, _name)))
