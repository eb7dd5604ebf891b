"""Functions that `torch.compile` does not trace: locks, hooks and collectives.

The marks are those that the compiler's own decorator makes, which would load the compiler; that
takes a second.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from dure import torch_private

P = ParamSpec("P")
T = TypeVar("T")

COMPILER = "torch._dynamo"
"""The compiler's module: if it is not loaded, nothing has been compiled."""

_frames: Any = torch_private.eval_frame
_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
_SKIP_BELOW = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def untraced_here(function: Callable[P, T], reason: str | None = None) -> Callable[P, T]:
    """Keep the compiler out of `function`, but not of what it calls; `reason` as below."""
    _frames.set_code_exec_strategy(function.__code__, _SKIP)
    _mark(function, reason)
    return function


def untraced_below(function: Callable[P, T], reason: str | None = None) -> Callable[P, T]:
    """Keep the compiler out of `function` and of what it calls, at no cost for each call.

    The compiler reports the `reason` for its stop, with ``fullgraph=True`` in its error.
    """
    _frames.set_code_exec_strategy(function.__code__, _SKIP_BELOW)
    _mark(function, reason)
    return function


def _mark(function: Any, reason: str | None) -> None:
    function._torchdynamo_disable = True
    if reason is not None:
        function._torchdynamo_disable_msg = reason


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Keep the compiler out of `function` and of all that it calls, with a check at each call."""
    disabled: list[Callable[P, T]] = []

    @untraced_here
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if COMPILER not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # pyright: ignore
        return disabled[0](*args, **kwargs)

    return run


def constant(function: Callable[P, T]) -> Callable[P, T]:
    """Let the compiler call `function` while it reads a program, and keep what it returns.

    What is returned must be made of strings and numbers. Arguments that are objects become
    conditions of the compiled code.
    """
    function._dynamo_marked_constant = True  # pyright: ignore
    return function
