"""Keeping torch.compile out of the plug-in's own functions.

Dynamo follows a compiled program into every Python function it calls. It has nothing to gain in
ours, and stops at the first thing it cannot model. `torch.compiler.disable` would keep it out, but
costs a microsecond a call and loads the compiler when a group is made. Telling the interpreter's
frame evaluator to run a function's code, and all that it calls, as it is costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

__all__ = ["opaque"]

F = TypeVar("F", bound=Callable[..., object])


def opaque(function: F) -> F:
    """Make torch.compile run `function`, and what it calls, without looking into it.

    Where this torch has no such switch, the function is returned as it is: compiled programs then
    may fail to trace, and others see no difference.
    """
    with suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame  # lazy: private, so it may be missing

        skip = eval_frame._FrameAction.SKIP  # pyright: ignore[reportPrivateUsage]
        strategy = eval_frame._FrameExecStrategy(skip, skip)  # pyright: ignore[reportPrivateUsage]
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function
