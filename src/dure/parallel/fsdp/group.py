"""The parameters of one `fully_shard` call that have one dtype, and are all trained or all frozen.

A group's `ShardedState` says whether modules have the shards or the unsharded parameters, whose
values its strategy keeps. Gradients of unsharded parameters are reduced when the group's backward
has ended, and the result is waited for when the complete backward has.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.errors import CommError, ModuleError
from dure.parallel.fsdp.choosing import strategy_for
from dure.parallel.fsdp.parameter import FSDPParameter, run_hooks
from dure.parallel.fsdp.reducing import CustomCollective, Reduction
from dure.parallel.fsdp.states import SHARDED_TRANSITIONS, ShardedState, changed
from dure.parallel.fsdp.strategy import Strategy
from dure.parallel.fsdp.streams import side_streams
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
        requested: The strategy that the program asked for; None for the choice.
        post_forward_group: Ranks that keep unsharded parameters until backward; see `Gathered`.
        all_gather: A custom collective, which needs the strategy *gathered*.
        strategy: How the parameters are unsharded.
        sync: Reduce at this backward; else gradients stay unsharded.
        state: Whether modules have shards or unsharded parameters.
        accumulates: The last backward left its gradients to a later one, which adds to them.
    """

    parameters: list[FSDPParameter]
    reduction: Reduction
    requested: str | None = None
    post_forward_group: ProcessGroup | None = None
    all_gather: CustomCollective | None = None
    strategy: Strategy = field(init=False)
    sync: bool = True
    state: ShardedState = field(default=ShardedState.SHARDED, init=False)
    accumulates: bool = field(default=False, init=False)
    _recorded_versions: list[int] = field(default_factory=list[int], init=False)
    _dtypes: list[torch.dtype] = field(default_factory=list[torch.dtype], init=False)
    _arriving: list[tuple[FSDPParameter, torch.Tensor]] = field(
        default_factory=list[tuple[FSDPParameter, torch.Tensor]], init=False
    )
    _arrival: Any = field(default=None, init=False)  # an event: gradients were copied to the host

    def __post_init__(self) -> None:
        self._choose()

    def _choose(self) -> None:
        axes = self.reduction.axes
        self.strategy = strategy_for(
            self.parameters, axes, self.requested, self.post_forward_group, self.all_gather
        )
        self._dtypes = [p.sharded.dtype for p in self.parameters]
        self._find_streams()

    def _find_streams(self) -> None:
        """Use the streams of the device that the parameters are on now."""
        group, device = self.reduction.axes.shard_group, self.parameters[0].device
        self.strategy.streams = self.reduction.streams = side_streams(group, device)

    def _change(self, new: ShardedState) -> None:
        name = self.parameters[0].name
        self.state = changed(self.state, new, SHARDED_TRANSITIONS, f"of {name}")

    @property
    def is_unsharded(self) -> bool:
        """Whether modules have the unsharded parameters."""
        return self.state is ShardedState.UNSHARDED

    @property
    def _defers(self) -> bool:
        """Whether backwards leave gradients to a later one, which reduces them over all ranks."""
        in_part = self.reduction.axes.replicate_group is not None and not self.reduction.replicate
        return in_part or not self.sync

    def rebuild_strategy(self) -> None:
        """Change the strategy, between steps: parameters are others, or what was asked for."""
        self.reshard()
        self._drop_unshard()
        self._choose()
        for parameter in self.parameters:
            parameter.unsharded = None

    def adopt(self) -> bool:
        """Take over what the program put in the place of shards since the last step.

        Returns:
            Whether unsharded parameters that were kept were freed, because shards have changed.
        """
        if self.is_unsharded and any(p.assigned is not None for p in self.parameters):
            self.reshard()
        adopted = [p.adopt() for p in self.parameters]
        dtypes = {p.dtype for p in self.parameters}
        if len(dtypes) > 1:
            raise ModuleError(
                "parameters that are gathered together have one dtype",
                op="FSDP forward",
                parameters=tuple(p.name for p in self.parameters),
                seen=", ".join(sorted(map(str, dtypes))),
                fix="Convert the complete module that fully_shard was given, or parts before that.",
            )
        if any(adopted):
            if self._dtypes != [p.sharded.dtype for p in self.parameters]:
                self.rebuild_strategy()
            self.strategy.attach()
            self._find_streams()
            if self.strategy.frees:  # `attach` has dropped the memory of all
                for parameter in self.parameters:
                    parameter.unsharded = None
        return self.free_stale()

    def free_stale(self) -> bool:
        """Free unsharded parameters if a rank has written its shards; return whether it did."""
        is_stale = self.strategy.is_stale(self.accumulates)
        if is_stale:
            self.reshard()
            self.strategy.reshard()
        return is_stale

    def adopt_replaced(self) -> None:
        """Take over shards that the program has replaced, before an unshard outside of a step."""
        if not self.is_unsharded and any(p.is_replaced for p in self.parameters):
            self.adopt()
            self.publish()

    def publish(self) -> None:
        """Let other ranks read what this rank has written; drop an unshard that was started."""
        self.strategy.publish()
        self._drop_unshard()

    def _drop_unshard(self) -> None:
        if self.state is ShardedState.UNSHARDING:
            self._change(ShardedState.SHARDED)

    @property
    def begins_gather(self) -> bool:
        """Whether `unshard` would begin a gather."""
        return self.state is ShardedState.SHARDED and self.strategy.begins_gather

    def unshard(self) -> ProcessGroup | None:
        """Start to unshard the parameters; see `Strategy.unshard`."""
        if self.state is not ShardedState.SHARDED:
            return None
        group = self.strategy.unshard()
        self._change(ShardedState.UNSHARDING)
        return group

    def wait_for_unshard(self) -> None:
        """Wait for the unshard, and let modules have the unsharded parameters."""
        if self.is_unsharded:
            return
        self.unshard()
        for parameter, tensor in zip(self.parameters, self.strategy.wait(), strict=True):
            parameter.to_unsharded(tensor)
        self._change(ShardedState.UNSHARDED)

    def record_versions(self) -> None:
        """Note that a forward has ended, and has perhaps left the group unsharded."""
        self._recorded_versions = (
            [p.unsharded_version for p in self.parameters] if self.is_unsharded else []
        )

    def check_versions(self) -> bool:
        """See that nothing was written into what a forward has left unsharded, if one has.

        Returns:
            Whether one has.

        Raises:
            ModuleError: A parameter was. It is no shard, so that this is lost, or was done by all
                ranks to the memory that they share.
        """
        versions, self._recorded_versions = self._recorded_versions, []
        for parameter, version in zip(self.parameters, versions, strict=False):
            if parameter.unsharded_version != version:
                with suppress(ModuleError):  # which would say less
                    self.reshard()
                raise ModuleError(
                    "an unsharded parameter was written between steps",
                    op="fully_shard",
                    parameters=(parameter.name,),
                    seen=f"{parameter.name} {list(parameter.unsharded_shape)}: a forward with "
                    "gradients, without a backward, has left its module unsharded",
                    fix="Call reshard() of the module before writing its parameters, or run that "
                    "forward under torch.no_grad().",
                )
        return bool(versions)

    def reshard(self, for_backward: bool = False, keeps: bool = False) -> None:
        """Let modules have the shards, and free the unsharded; see `Strategy.reshard`.

        Args:
            for_backward: They are read again in this step's backward.
            keeps: Keep the memory of the unsharded parameters, which a graph reads.
        """
        self.check_versions()
        if self.is_unsharded:
            for parameter in self.parameters:
                parameter.to_sharded()
        elif self.state is not ShardedState.SHARDED_RETAINED:
            return
        if not (keeps and self.strategy.frees):
            self._change(ShardedState.SHARDED)
            self.strategy.reshard(for_backward)
            self._trim()
        elif self.is_unsharded:
            self._change(ShardedState.SHARDED_RETAINED)

    def _trim(self) -> None:
        """Where memory is scarce: give back what the allocator keeps of what was freed."""
        if self.parameters[0].files is not None:
            give_back_freed()

    def begin_reduce(self) -> None:
        """Start to reduce the gradients of unsharded parameters, or keep them if `sync` is off."""
        dtype, self.accumulates = self.reduction.dtype, self._defers
        if not any(p.is_trained for p in self.parameters):
            return
        if not self.sync:
            for parameter in self.parameters:
                parameter.accumulate(dtype)
            return
        assert not self.reduction.is_begun
        gradients = [p.pop_gradient(dtype) if p.is_trained else None for p in self.parameters]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                self.strategy.has_taken_gradient(parameter)
        self.reduction.begin(gradients)

    @property
    def trained_bytes(self) -> int:
        """Bytes of this rank's gradients of unsharded parameters."""
        trained = (p for p in self.parameters if p.is_trained)
        return sum(p.unsharded_shape.numel() * p.dtype.itemsize for p in trained)

    def finish_reduce(self) -> Sequence[Delivery]:
        """Wait for the reduction that was begun, if any, and give the shards their gradients.

        Returns:
            The gradients that hooks of the program wait for until the end of backward.
        """
        if not self.reduction.is_begun:
            return ()
        streams = self.reduction.streams
        if streams is None:
            now, later = self._add_gradients()
        else:
            with streams.reducing():
                now, later = self._add_gradients()
                if self.parameters[0].host is not None:
                    self._arrival = streams.reduced()
            self.reduction.free_copied_in()
        if streams is None or not now:
            deliver(now)
        elif self._arrival is not None:  # hooks get gradients on the host
            self._arrival.synchronize()
            deliver(now)
        else:  # hooks of the program run in its own stream
            streams.wait_for_reduced()
            deliver(now)
            streams.reduce_after_current()
        self._trim()
        return later

    def _add_gradients(self) -> tuple[list[Delivery], list[Delivery]]:
        """Add reduced gradients to the shards'; return those that hooks wait for.

        Returns:
            Those to deliver now, and at the end of backward.
        """
        now: list[Delivery] = []
        later: list[Delivery] = []
        waits = self.reduction.streams is None
        for parameter, reduced in zip(self.parameters, self.reduction.finish(), strict=True):
            if reduced is None:
                continue
            part, host = reduced, parameter.host
            if host is not None:
                part = host.gradient_in(reduced, parameter.sharded.dtype, waits)
            if parameter.has_hooks:
                delivery = Delivery(self.strategy, parameter, parameter.as_gradient(part))
                (later if parameter.waits_for_end else now).append(delivery)
            elif host is not None:
                self._arriving.append((parameter, part))
            else:
                parameter.add_gradient(part)
        return now, later

    def add_arrived(self) -> None:
        """Wait until gradients were copied to the host, and give them to the shards."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None
        arrived, self._arriving = self._arriving, []
        for parameter, part in arrived:
            parameter.add_gradient(part)

    def reset(self) -> None:
        """Drop what a step that failed has left; wait for what others still read."""
        self._recorded_versions = []
        self._arriving, self._arrival = [], None
        if self.reduction.is_begun:
            with suppress(CommError):
                self.reduction.finish()
            self.reduction.free_copied_in()
        for parameter in self.parameters:
            parameter.accumulated = None
            if parameter.unsharded is not None:
                parameter.unsharded.grad = None
