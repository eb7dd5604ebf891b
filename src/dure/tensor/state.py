"""Switches that a `with` block sets for the code in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

__all__ = [
    "decomposing",
    "implicit_replication",
    "in_hook",
    "replicating",
    "strict",
    "strictly",
    "within_decomposition",
    "within_hook",
]

implicit_replication: ContextVar[bool] = ContextVar("dure_implicit_replication", default=False)
decomposing: ContextVar[bool] = ContextVar("dure_decomposing", default=False)
in_hook: ContextVar[bool] = ContextVar("dure_in_hook", default=False)
"""Whether a hook of a DTensor's gradient runs."""
strict: ContextVar[bool] = ContextVar("dure_strict", default=False)


@contextmanager
def _on(switch: ContextVar[bool]) -> Iterator[None]:
    token = switch.set(True)
    try:
        yield
    finally:
        switch.reset(token)


def replicating() -> AbstractContextManager[None]:
    """Take plain tensors beside DTensors as replicated, for the length of a `with` block.

    That is `implicit_replication`, and all of `loss_parallel`: `torch.nn.functional.cross_entropy`
    of a DTensor whose classes are sharded gathers nothing (rules/softmax.py), in this block or out
    of it, for every reduction, with weights, ignored targets and label smoothing, on meshes of any
    number of axes. The loss is replicated along the axis of the classes: `to_local` of it is the
    loss, or its part or term of this rank's samples if the batch is sharded along another axis.
    Of targets that are probabilities it is a term: use `full_tensor`. Torch's programs compute the
    loss and its backward in this block, where targets may be plain tensors that all ranks have.
    """
    return _on(implicit_replication)


def strictly() -> AbstractContextManager[None]:
    """Refuse operators that would be computed replicated, for the length of a `with` block.

    Such an operator raises `PlacementError`, before anything is sent. In `parallelize_module` a
    path of a plan that matches no module raises `UsageError`.
    """
    return _on(strict)


def within_hook() -> AbstractContextManager[None]:
    """Mark that a hook of a DTensor's gradient runs, for the length of a `with` block."""
    return _on(in_hook)


def within_decomposition() -> AbstractContextManager[None]:
    """Mark that operators are run to compute another one, for the length of a `with` block."""
    return _on(decomposing)
