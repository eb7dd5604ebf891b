"""Excluding the plug-in's functions from torch.compile.

Dynamo traces every Python function that a compiled program calls. Tracing ours gains nothing, and
fails where Dynamo does not support something. `torch.compiler.disable` excludes a function, but
costs 1 us per call, and imports the compiler when a group is made. A setting of Dynamo's frame
evaluator excludes a function's code, and everything that it calls, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

__all__ = ["opaque"]

F = TypeVar("F", bound=Callable[..., object])


def opaque(function: F) -> F:
    """Exclude `function`, and the functions that it calls, from torch.compile.

    If this version of torch has no such setting, the function is not changed, and compiled programs
    that use the plug-in may fail to trace.
    """
    with suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame  # lazy: private, so it may be missing

        skip = eval_frame._FrameAction.SKIP  # pyright: ignore[reportPrivateUsage]
        strategy = eval_frame._FrameExecStrategy(skip, skip)  # pyright: ignore[reportPrivateUsage]
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function
