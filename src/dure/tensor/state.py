"""Switches that a `with` block sets for the code in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = [
    "decomposing",
    "implicit_replication",
    "replicating",
    "strict",
    "strictly",
    "within_decomposition",
]

implicit_replication: ContextVar[bool] = ContextVar("dure_implicit_replication", default=False)
decomposing: ContextVar[bool] = ContextVar("dure_decomposing", default=False)
strict: ContextVar[bool] = ContextVar("dure_strict", default=False)


@contextmanager
def replicating() -> Iterator[None]:
    """Take plain tensors beside DTensors as replicated, for the length of a `with` block."""
    token = implicit_replication.set(True)
    try:
        yield
    finally:
        implicit_replication.reset(token)


@contextmanager
def strictly() -> Iterator[None]:
    """Refuse operators that would be computed replicated, for the length of a `with` block.

    Such an operator raises `PlacementError`, before anything is sent. In `parallelize_module` a
    path of a plan that matches no module raises `UsageError`.
    """
    token = strict.set(True)
    try:
        yield
    finally:
        strict.reset(token)


@contextmanager
def within_decomposition() -> Iterator[None]:
    """Tell that operators are run to compute another one, for the length of a `with` block."""
    token = decomposing.set(True)
    try:
        yield
    finally:
        decomposing.reset(token)
