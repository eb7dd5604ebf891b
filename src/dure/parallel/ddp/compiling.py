"""DDP and `torch.compile`: what is compiled is the module, and it is cut where buckets end.

The code around the module (locks, hooks, collectives) is no material for graphs. Functions marked
`untraced` are run as they are, whether the user compiled the module inside or the wrapper.

A module that is compiled in one piece hands over all its gradients at the end of backward, when
there is nothing left to overlap their reduction with. torch's compiler therefore cuts a graph into
pieces of about a bucket each, if it is told that DDP is at work: it asks torch's own class which
module is active. `cut_graphs` answers for ours.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from dure.parallel.ddp.bucketing import FIRST_CAP_BYTES

__all__ = ["Cutting", "cut_graphs", "untraced", "untraced_here"]

P = ParamSpec("P")
T = TypeVar("T")

_COMPILER = "torch._dynamo"
_frames: Any = torch._C._dynamo.eval_frame  # pyright: ignore
_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)


class Cutting:
    """What the compiler asks the active DDP module for: how much goes into a piece."""

    __slots__ = ("bucket_bytes_cap",)

    def __init__(self, cap_bytes: int) -> None:
        # The compiler's first piece has this size, and it wants the others to be no smaller.
        self.bucket_bytes_cap = max(cap_bytes, FIRST_CAP_BYTES)


def untraced_here(function: Callable[P, T]) -> Callable[P, T]:
    """Keep the compiler out of `function`, but not of what it calls.

    The marks are those that the compiler's own decorator makes; that one would load the compiler.
    """
    _frames.set_code_exec_strategy(function.__code__, _SKIP)
    function._torchdynamo_disable = True  # pyright: ignore
    return function


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Keep the compiler out of `function` and of all that it calls; costs a look without one."""
    disabled: list[Callable[P, T]] = []

    @untraced_here
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if _COMPILER not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # pyright: ignore
        return disabled[0](*args, **kwargs)

    return run


@untraced
def cut_graphs(cutting: Any) -> Any:
    """Tell the compiler how to cut what it compiles from now on; return what it was told before.

    Any: an instance of torch's class, or a `Cutting`.
    """
    if _COMPILER not in sys.modules:
        return None
    theirs: Any = torch.nn.parallel.DistributedDataParallel
    before, theirs._active_ddp_module = theirs._active_ddp_module, cutting
    return before
