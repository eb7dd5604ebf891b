"""Excluding the plug-in's functions from torch.compile.

Dynamo traces every Python function that a compiled program calls. Tracing ours gains nothing, and
fails where Dynamo does not support something. `torch.compiler.disable` excludes a function, but
costs 1 us per call, and imports the compiler when a group is made. A setting of Dynamo's frame
evaluator excludes a function's code, and everything that it calls, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dure import torch_private

__all__ = ["opaque"]

F = TypeVar("F", bound=Callable[..., object])


def opaque(function: F) -> F:
    """Exclude `function`, and the functions that it calls, from torch.compile."""
    frames = torch_private.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
