"""Functions that return futures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["MARK", "DeferredResult", "async_execution"]

P = ParamSpec("P")
R = TypeVar("R")

MARK = "_wrapped_async_rpc_function"
"""The attribute of such functions; torch's name, so that torch's decorator works, too."""


@dataclass(slots=True)
class DeferredResult:
    """The result of a function of RPC's own that is answered with a future's value.

    Obtained from:
        Dure makes them, for functions of its own that answer later.
    """

    future: torch.futures.Future[Any]
    counted: bool = True  # whether a shutdown waits for it


def async_execution(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that returns a future: a remote call is answered with the future's value.

    No thread of the callee waits for the future.

    Args:
        fn: A function that returns a `torch.futures.Future`. Below `staticmethod` and
            `classmethod`, this decorator is the innermost. If the function returns anything else,
            the caller gets an `RpcError`.

    Returns:
        The function; a local call returns the future.

    Example:
        ```python
        @rpc.functions.async_execution
        def doubled(to, x):
            return rpc.rpc_async(to, torch.mul, (x, 2)).then(lambda done: done.value() + 1)

        assert doubled(f"worker{rank}", torch.ones(2)).wait().tolist() == [3.0, 3.0]
        ```
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return fn(*args, **kwargs)

    setattr(wrapper, MARK, fn)
    return wrapper
