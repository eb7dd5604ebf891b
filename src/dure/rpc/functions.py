"""Functions that return futures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["MARK", "Later", "async_execution"]

P = ParamSpec("P")
R = TypeVar("R")

MARK = "_wrapped_async_rpc_function"
"""The attribute of such functions; torch's name, so that either decorator does."""


@dataclass(slots=True)
class Later:
    """What a function of RPC's own returns, to be answered with the future's value."""

    future: torch.futures.Future[Any]
    counted: bool = True  # whether a shutdown waits for it


def async_execution(fn: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that returns a `torch.futures.Future`: its value is the answer to the call.

    No thread waits for the future. Under `staticmethod` and `classmethod` it comes first
    (innermost). A function that returns anything else is an error at the caller.
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return fn(*args, **kwargs)

    setattr(wrapper, MARK, fn)
    return wrapper
