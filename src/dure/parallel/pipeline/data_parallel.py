"""Stages that are replicated or sharded over another axis: when they gather, and when they reduce.

Gradients of all microbatches are added up on each rank, and reduced once, when the schedule says
so. Parameters of sharded stages are gathered where it says UNSHARD, and kept until RESHARD.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Protocol, runtime_checkable

from torch import nn

__all__ = ["DataParallelStage"]


class _Handle(Protocol):
    def wait(self) -> None: ...


@runtime_checkable
class _Sharded(Protocol):
    """What `fully_shard` makes of a module."""

    def unshard(self, async_op: bool = False) -> _Handle | None: ...
    def reshard(self) -> None: ...
    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None: ...
    def set_reshard_after_forward(self, reshard_after_forward: bool) -> None: ...
    def set_reshard_after_backward(self, reshard_after_backward: bool) -> None: ...
    def set_is_last_backward(self, is_last_backward: bool) -> None: ...
    def reduce_gradients(self) -> None: ...
    def reset_iter_state(self) -> None: ...


@runtime_checkable
class _Replicated(Protocol):
    """What `DistributedDataParallel` makes of a module."""

    def no_sync(self) -> AbstractContextManager[None]: ...
    def reduce_gradients(self) -> None: ...


class DataParallelStage:
    """What a schedule's actions mean for a stage's module; nothing for a module that is neither.

    Args:
        module: The stage's; sharded modules may lie within it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._handles: list[_Handle] = []
        self._is_prepared = False

    @cached_property
    def _sharded(self) -> list[_Sharded]:
        """All sharded modules; looked for when a step is made first."""
        return [m for m in self._module.modules() if isinstance(m, _Sharded)]

    @property
    def is_sharded(self) -> bool:
        """Whether modules of the stage are sharded, and have others than their own parameters."""
        return bool(self._sharded)

    @cached_property
    def _roots(self) -> list[_Sharded]:
        """The outermost ones."""
        inner: set[object] = set()
        for module in self._sharded:
            assert isinstance(module, nn.Module)
            inner.update(child for child in module.modules() if child is not module)
        return [module for module in self._sharded if module not in inner]

    @cached_property
    def _replicated(self) -> _Replicated | None:
        return self._module if isinstance(self._module, _Replicated) else None

    def begin(self, training: bool) -> None:
        """Begin a step: keep what is gathered, add up gradients."""
        if self._is_prepared:
            return
        for module in self._roots:
            module.set_reshard_after_forward(False)
            module.set_reshard_after_backward(False)
            module.set_requires_gradient_sync(False)
            module.set_is_last_backward(False)
        self._is_prepared = training

    def unshard(self) -> None:
        """Begin to gather."""
        handles = [module.unshard(async_op=True) for module in self._sharded]
        self._handles += [handle for handle in handles if handle is not None]

    def wait(self) -> None:
        """Wait for what is being gathered."""
        while self._handles:
            self._handles.pop().wait()

    def reshard(self) -> None:
        """Free what was gathered."""
        self.wait()
        for module in self._sharded:
            module.reshard()

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is reduced."""
        return nullcontext() if self._replicated is None else self._replicated.no_sync()

    def reduce(self) -> None:
        """Reduce the gradients that were added up."""
        if self._replicated is not None:
            self._replicated.reduce_gradients()
        for module in self._roots:
            module.reduce_gradients()

    def forget(self) -> None:
        """Drop what a step that failed has gathered and added up."""
        self._handles.clear()
        for module in self._roots:
            module.reset_iter_state()
