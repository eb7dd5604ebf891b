"""Whether a graph is being captured, and what collectives do then.

Torch captures graphs in several ways: `make_fx`, `torch.export` and AOTAutograd push modes on the
stack of dispatch modes, `FakeTensorMode` does so too, `torch.jit.trace` has a state of its own,
`vmap` and the other transforms of `torch.func` wrap tensors, and `torch.compile` reads the Python
code. None of them sees a collective that works on the memory of tensors. So

* functional collectives run as operators of torch (operators.py) as long as `capturing` is true:
  they are nodes of the graph, and have results without values where inputs have no values;
* operations of a group that write into tensors are refused by name (`refuse`).

The engine's fast path checks for modes and for `torch.jit.trace`, and then declines the call
(csrc/bindings/tensor.h). Slower checks are made only if `_modes._is_in_torch_dispatch_mode`, a flag
of the process, is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from dure import torch_private
from dure.comm.untraced import untraced_below
from dure.errors import UsageError

__all__ = [
    "capturing",
    "has_no_values",
    "in_fake_mode",
    "in_transform",
    "is_jit_tracing",
    "making_a_graph",
    "out_of_graphs",
    "refuse_if_captured",
    "refuse_in_jit_trace",
]

_modes: Any = torch_private.dispatch_modes
"""Torch's module, whose flag `_is_in_torch_dispatch_mode` says that a thread is in a mode."""

is_jit_tracing = torch.jit.is_tracing  # pyright: ignore
"""Return whether this thread is inside `torch.jit.trace`; the compiler knows the answer."""
_is_tracing = torch_private.is_tracing
_num_modes = torch_private.len_torch_dispatch_stack
_mode_of: Any = torch_private.get_dispatch_mode
_Key: Any = torch_private.TorchDispatchModeKey
_CAPTURES = (_Key.PROXY, _Key.FAKE, _Key.FUNCTIONAL)
_level: Any = torch_private.functorch.maybe_current_level
_innermost: Any = torch_private.functorch.peek_interpreter_stack
_FUNCTIONALIZE: Any = torch_private.functorch.TransformType.Functionalize
_is_wrapped: Any = torch_private.functorch.is_functorch_wrapped_tensor
_forward_ad: Any = torch_private.forward_ad
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_INSTEAD = "Use dure.comm.functional or dure.nn.functional, whose collectives return new tensors."


def capturing(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a collective on `tensors` must be an operator, not work on their memory."""
    if _num_modes() or _is_tracing() or _forward_ad._current_level >= 0:
        return True
    for tensor in tensors:  # `any` would cost as much as the rest
        if type(tensor) not in _PLAIN and _has_no_memory(tensor):
            return True
    return _level() is not None and any(map(_is_wrapped, tensors))


def making_a_graph(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether an operator on `tensors` becomes part of a graph, or finds no values.

    If only other dispatch modes are on the stack, such as those that count operators, it does not.
    """
    if _is_tracing() or _forward_ad._current_level >= 0:
        return True
    if any(_mode_of(key) is not None for key in _CAPTURES):
        return True
    return any(map(_has_no_memory, tensors))


def in_transform() -> bool:
    """Return whether a transform of torch.func, or forward-mode differentiation, is under way.

    Not `functionalize`, which takes operators as they are.
    """
    if _level() is not None:
        return _innermost().key() != _FUNCTIONALIZE
    return _forward_ad._current_level >= 0


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is fake, functional, or wrapped by a transform of torch.func."""
    cls = type(tensor)
    if cls not in _PLAIN and getattr(cls, "_mode_key", None) is not None:
        return True
    return _level() is not None and _is_wrapped(tensor)


def out_of_graphs(*functions: Callable[..., Any]) -> None:
    """Let `torch.compile` run operations as they are, and say what to use in a graph.

    With ``fullgraph=True`` the compiler's error says so.
    """
    for function in functions:
        reason = f"dure.{function.__name__} works on the memory of tensors, which a graph does not"
        untraced_below(function, f"{reason} show. {_INSTEAD}")


def in_fake_mode() -> bool:
    """Return whether this thread is within `FakeTensorMode`."""
    return _modes._is_in_torch_dispatch_mode and _mode_of(_Key.FAKE) is not None


def has_no_values(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether any tensor has no values.

    It is on the meta device, is fake, or is passed under `FakeTensorMode`.
    """
    if tensors and in_fake_mode():
        return True
    for tensor in tensors:  # `any` would cost as much as the rest
        if tensor.is_meta:
            return True
        if type(tensor) not in _PLAIN and getattr(type(tensor), "_mode_key", None) is _Key.FAKE:
            return True
    return False


def refuse_if_captured(op: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise if a graph is being captured, which would lack an operation that writes into tensors.

    Operations without tensors run under `FakeTensorMode` as they do elsewhere.

    Raises:
        UsageError: It says what to use in graphs.
    """
    if _is_tracing():
        _refuse(op, "torch.jit.trace")
    if _modes._is_in_torch_dispatch_mode:
        for key in _CAPTURES if tensors else _CAPTURES[:1]:
            if (mode := _mode_of(key)) is not None:
                _refuse(op, type(mode).__name__)
    for tensor in tensors:
        if _has_no_memory(tensor):
            _refuse(op, f"torch.func, or with a {type(tensor).__name__} that has no memory")


def refuse_in_jit_trace(op: str) -> None:
    """Raise inside `torch.jit.trace`, for tensors made of tensors: it does not see their parts.

    Raises:
        UsageError: Naming what was called.
    """
    if _is_tracing():
        raise UsageError(
            f"{op} cannot be captured by torch.jit.trace",
            op=op,
            seen="it does not see what operators on DTensors do with their parts",
            fix="Use torch.export or make_fx.",
        )


def _refuse(op: str, seen: str) -> NoReturn:
    raise UsageError(
        f"{op} cannot be captured in a graph, nor run on tensors without values",
        op=op,
        seen=f"it was called under {seen}",
        fix=f"{_INSTEAD} Or call it outside of the function that is captured.",
    )
