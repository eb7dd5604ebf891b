"""Settings that a `with` block changes for the code in it."""

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
    """Take plain tensors among DTensors as replicated, for the length of a `with` block.

    Known as `implicit_replication` and, for losses, as `loss_parallel`. A loss does not need the
    block: `torch.nn.functional.cross_entropy` of a DTensor whose classes are sharded gathers
    nothing, with every reduction, weights, ignored targets and label smoothing, on meshes of any
    number of axes. Programs written for torch compute the loss and its backward in this block, in
    which targets may be plain tensors that all ranks have.

    The loss is replicated along the axis that shards the classes: `to_local` returns the loss or,
    if another axis shards the batch, its part or term of this rank's samples. If targets are
    probabilities, the loss is Partial: use `full_tensor`.

    Returns:
        A context manager.

    Collective:
        Forward of the loss, along the axis that shards the classes: two all_reduces of one number
        per sample, and one of the loss. Backward: one all_reduce of one number per sample.

    Example:
        ```python
        from dure.tensor import Shard, distribute_tensor, init_device_mesh
        from dure.tensor.parallel import loss_parallel

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        logits = distribute_tensor(torch.zeros(3, 4), mesh, [Shard(1)])
        with loss_parallel():
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 3]))
        assert abs(loss.to_local().item() - 1.3863) < 1e-4  # log(4)
        ```
    """
    return _on(implicit_replication)


def strictly() -> AbstractContextManager[None]:
    """Refuse operators without a sharding rule that would gather, for the length of a `with` block.

    Such an operator raises `PlacementError` before anything is sent. In `parallelize_module` a path
    of a plan that matches no module raises `UsageError`.

    Returns:
        A context manager.

    Example:
        ```python
        from dure.tensor import strict

        with strict():
            (logits + 1).sum()  # has a rule; an operator without one would raise
        ```
    """
    return _on(strict)


def within_hook() -> AbstractContextManager[None]:
    """Mark that a hook of a DTensor's gradient runs, for the length of a `with` block."""
    return _on(in_hook)


def within_decomposition() -> AbstractContextManager[None]:
    """Mark that operators are run to compute another one, for the length of a `with` block."""
    return _on(decomposing)
