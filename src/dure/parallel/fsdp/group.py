"""The parameters of one `fully_shard` call that have one dtype, and are all trained or all frozen.

A group is *sharded* (modules have the shards) or *unsharded* (modules have wholes, whose values its
strategy keeps). Gradients of wholes are reduced when the group's backward has ended, and the result
waited for when the whole backward has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.strategy import Reduction, Strategy

__all__ = ["ParameterGroup"]


@dataclass(slots=True, kw_only=True)
class ParameterGroup:
    """A group of parameters; see the module's text.

    Attributes:
        parameters: One dtype; all need gradients, or none does.
        strategy: How they become whole.
        reduction: How gradients are reduced.
        sync: Reduce at this backward; else gradients are kept whole.
        unsharded: Modules have the wholes.
    """

    parameters: list[FSDPParameter]
    strategy: Strategy
    reduction: Reduction
    sync: bool = True
    unsharded: bool = False
    _reducing: Callable[[], Sequence[torch.Tensor | None]] | None = field(default=None, init=False)

    def adopt(self) -> None:
        """Take over what the program put in the place of shards since the last step."""
        adopted = [p.adopt() for p in self.parameters]
        if any(adopted):
            self.strategy.attach()

    def unshard(self) -> None:
        """Begin to make the parameters whole."""
        if not self.unsharded:
            self.strategy.unshard()

    def show_wholes(self) -> None:
        """Let modules have the wholes, as soon as they are there."""
        if not self.unsharded:
            for parameter, tensor in zip(self.parameters, self.strategy.wait(), strict=True):
                parameter.show_whole(tensor)
            self.unsharded = True

    def reshard(self) -> None:
        """Let modules have the shards, and free the wholes."""
        if self.unsharded:
            for parameter in self.parameters:
                parameter.show_sharded()
            self.strategy.reshard()
            self.unsharded = False

    def end_backward(self) -> None:
        """Begin to reduce the gradients that the wholes got, or keep them where `sync` is off."""
        dtype = self.reduction.dtype
        if not any(p.is_trained for p in self.parameters):
            return
        if not self.sync:
            for parameter in self.parameters:
                parameter.accumulate(dtype)
            return
        self.finish_reduction()
        gradients = [p.take_gradient(dtype) if p.is_trained else None for p in self.parameters]
        self._reducing = self.strategy.reduce(gradients, self.reduction)

    def finish_reduction(self) -> None:
        """Wait for the reduction that was begun, and give the shards their gradients."""
        if self._reducing is None:
            return
        finish, self._reducing = self._reducing, None
        for parameter, part in zip(self.parameters, finish(), strict=True):
            if part is not None:
                parameter.give_gradient(part)

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self._reducing = None
        for parameter in self.parameters:
            parameter.accumulated = None
            if parameter.whole is not None:
                parameter.whole.grad = None
