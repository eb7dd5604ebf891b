"""The parameters of one `fully_shard` call that have one dtype, and are all trained or all frozen.

A group is *sharded* (modules have the shards) or *unsharded* (modules have wholes, whose values its
strategy keeps). Gradients of wholes are reduced when the group's backward has ended, and the result
waited for when the whole backward has.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from dure.errors import CommError, ModuleError
from dure.parallel.fsdp.choosing import strategy_for
from dure.parallel.fsdp.parameter import FSDPParameter, run_hooks
from dure.parallel.fsdp.reducing import CustomCollective, Reduction
from dure.parallel.fsdp.strategy import Strategy
from dure.training.memory import give_back_freed

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Delivery", "ParameterGroup", "deliver"]


class Delivery(NamedTuple):
    """A reduced gradient for a shard that has hooks.

    Attributes:
        strategy: Of the shard's group.
        parameter: Whose shard.
        gradient: `FSDPParameter.as_gradient`.
    """

    strategy: Strategy
    parameter: FSDPParameter
    gradient: torch.Tensor


def deliver(deliveries: Sequence[Delivery]) -> None:
    """Add gradients to those of the shards, all in one backward, and run the shards' hooks."""
    if not deliveries:
        return
    parameters = [d.parameter for d in deliveries]
    with ExitStack() as stack:
        for strategy in {d.strategy for d in deliveries}:
            own = [d.parameter for d in deliveries if d.strategy is strategy]
            stack.enter_context(strategy.hooks_may_write(own))
        run_hooks(parameters, [d.gradient for d in deliveries])


@dataclass(slots=True, kw_only=True, eq=False)
class ParameterGroup:
    """A group of parameters; see the module's text.

    Attributes:
        parameters: One dtype; all need gradients, or none does.
        reduction: How gradients are reduced.
        asked: The strategy that is to be; None for the choice.
        near: Ranks that keep the wholes between them until backward; see `Gathered`.
        all_gather: The program's own, for which the strategy must be *gathered*.
        strategy: How the parameters become whole.
        sync: Reduce at this backward; else gradients are kept whole.
        unsharded: Modules have the wholes.
        accumulates: The last backward left its gradients to a later one, which adds to them.
    """

    parameters: list[FSDPParameter]
    reduction: Reduction
    asked: str | None = None
    near: ProcessGroup | None = None
    all_gather: CustomCollective | None = None
    strategy: Strategy = field(init=False)
    sync: bool = True
    unsharded: bool = False
    accumulates: bool = field(default=False, init=False)
    _is_kept: bool = field(default=False, init=False)
    _left: list[int] = field(default_factory=list[int], init=False)
    _dtypes: list[torch.dtype] = field(default_factory=list[torch.dtype], init=False)

    def __post_init__(self) -> None:
        self._choose()

    def _choose(self) -> None:
        axes = self.reduction.axes
        self.strategy = strategy_for(self.parameters, axes, self.asked, self.near, self.all_gather)
        self._dtypes = [p.sharded.dtype for p in self.parameters]

    @property
    def _defers(self) -> bool:
        """Whether backwards leave gradients to a later one, which reduces them over all ranks."""
        in_part = self.reduction.axes.replicate_group is not None and not self.reduction.replicate
        return in_part or not self.sync

    def remake(self) -> None:
        """Change the strategy, between steps: parameters are others, or what was asked for."""
        self.reshard()
        self._choose()
        for parameter in self.parameters:
            parameter.whole = None

    def adopt(self) -> bool:
        """Take over what the program put in the place of shards since the last step.

        Returns:
            Whether wholes that were kept were freed, as shards were written since.
        """
        if self.unsharded and any(p.assigned is not None for p in self.parameters):
            self.reshard()
        adopted = [p.adopt() for p in self.parameters]
        dtypes = {p.dtype for p in self.parameters}
        if len(dtypes) > 1:
            raise ModuleError(
                "parameters that are gathered together have one dtype",
                op="FSDP forward",
                parameters=tuple(p.name for p in self.parameters),
                seen=", ".join(sorted(map(str, dtypes))),
                fix="Convert the whole module that fully_shard was given; or part of it before.",
            )
        if any(adopted):
            if self._dtypes != [p.sharded.dtype for p in self.parameters]:
                self.remake()
            self.strategy.attach()
            if self.strategy.frees:  # `attach` has dropped the memory of all
                for parameter in self.parameters:
                    parameter.whole = None
        return self.free_stale()

    def free_stale(self) -> bool:
        """Free wholes that were kept, if any rank has written its shards since; tell whether."""
        is_stale = self.strategy.is_stale(self.accumulates)
        if is_stale:
            self.reshard()
            self.strategy.reshard()
        return is_stale

    def adopt_replaced(self) -> None:
        """Take over shards that the program has replaced, before an unshard outside of a step."""
        if not self.unsharded and any(p.is_replaced for p in self.parameters):
            self.adopt()
            self.strategy.publish()

    @property
    def begins_gather(self) -> bool:
        """Whether `unshard` would begin a gather."""
        return not self.unsharded and self.strategy.begins_gather

    def unshard(self) -> ProcessGroup | None:
        """Begin to make the parameters whole; see `Strategy.unshard`."""
        return None if self.unsharded else self.strategy.unshard()

    def show_wholes(self) -> None:
        """Let modules have the wholes, as soon as they are there."""
        if not self.unsharded:
            for parameter, tensor in zip(self.parameters, self.strategy.wait(), strict=True):
                parameter.show_whole(tensor)
            self.unsharded, self._is_kept = True, False

    def leave(self) -> None:
        """Note that a forward has ended, and has perhaps left the group unsharded."""
        self._left = [p.unsharded_version for p in self.parameters] if self.unsharded else []

    def check_left(self) -> bool:
        """See that nothing was written into what a forward has left unsharded, if one has.

        Returns:
            Whether one has.

        Raises:
            ModuleError: A parameter was. It is no shard, so that this is lost, or was done by all
                ranks to the memory that they share.
        """
        versions, self._left = self._left, []
        for parameter, version in zip(self.parameters, versions, strict=False):
            if parameter.unsharded_version != version:
                with suppress(ModuleError):  # which would say less
                    self.reshard()
                raise ModuleError(
                    "an unsharded parameter was written between steps",
                    op="fully_shard",
                    parameters=(parameter.name,),
                    seen=f"{parameter.name} {list(parameter.whole_shape)}: a forward with "
                    "gradients, without a backward, has left its module unsharded",
                    fix="Call reshard() of the module before writing its parameters, or run that "
                    "forward under torch.no_grad().",
                )
        return bool(versions)

    def reshard(self, for_backward: bool = False, keeps: bool = False) -> None:
        """Let modules have the shards, and free the wholes; see `Strategy.reshard`.

        Args:
            for_backward: They are read again in this step's backward.
            keeps: Keep the memory of the wholes, which a graph reads.
        """
        self.check_left()
        if self.unsharded:
            for parameter in self.parameters:
                parameter.hide_whole()
        elif not self._is_kept:
            return
        self._is_kept, self.unsharded = keeps and self.strategy.frees, False
        if not self._is_kept:
            self.strategy.reshard(for_backward)
            self._trim()

    def _trim(self) -> None:
        """Where memory is scarce: give back what the allocator keeps of what was freed."""
        if self.parameters[0].files is not None:
            give_back_freed()

    def end_backward(self) -> None:
        """Begin to reduce the gradients that the wholes got, or keep them where `sync` is off."""
        dtype, self.accumulates = self.reduction.dtype, self._defers
        if not any(p.is_trained for p in self.parameters):
            return
        if not self.sync:
            for parameter in self.parameters:
                parameter.accumulate(dtype)
            return
        assert not self.reduction.is_begun
        gradients = [p.take_gradient(dtype) if p.is_trained else None for p in self.parameters]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                self.strategy.has_taken_gradient(parameter)
        self.reduction.begin(gradients)

    @property
    def trained_bytes(self) -> int:
        """Of this rank's gradients of the wholes."""
        trained = (p for p in self.parameters if p.is_trained)
        return sum(p.whole_shape.numel() * p.dtype.itemsize for p in trained)

    def finish_reduction(self) -> Sequence[Delivery]:
        """Wait for the reduction that was begun, if any, and give the shards their gradients.

        Returns:
            The gradients that hooks of the program wait for until the end of backward.
        """
        if not self.reduction.is_begun:
            return ()
        now: list[Delivery] = []
        later: list[Delivery] = []
        for parameter, part in zip(self.parameters, self.reduction.finish(), strict=True):
            if part is None:
                continue
            if parameter.has_hooks:
                delivery = Delivery(self.strategy, parameter, parameter.as_gradient(part))
                (later if parameter.waits_for_end else now).append(delivery)
            else:
                parameter.give_gradient(part)
        deliver(now)
        self._trim()
        return later

    def forget(self) -> None:
        """Drop what a step that failed has left; wait for what others still read."""
        self._left = []
        if self.reduction.is_begun:
            with suppress(CommError):
                self.reduction.finish()
        for parameter in self.parameters:
            parameter.accumulated = None
            if parameter.whole is not None:
                parameter.whole.grad = None
