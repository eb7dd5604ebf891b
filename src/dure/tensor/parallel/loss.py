"""`loss_parallel`: cross entropy of logits that are sharded over the classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dure.tensor import state

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Take plain targets and weights of a loss as replicated, for the length of a `with` block.

    `torch.nn.functional.cross_entropy` of a DTensor whose classes are sharded gathers nothing
    (rules/softmax.py), in this block or out of it, for every reduction, with weights,
    ignored targets and label smoothing, on meshes of any number of axes. Torch's programs compute
    the loss and its backward in this block, where targets may be plain tensors that all ranks have.
    """
    with state.replicating():
        yield
