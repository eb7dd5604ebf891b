"""DDP in a `Join`: its announcements, and how a rank without inputs shadows it.

DDP communicates at two places in a step, and announces each just before it gets there:

* *buffers*: a forward broadcasts the module's buffers, from the highest rank that still has inputs
  (torch's choice; without a Join it is rank 0). A shadow receives them. A buffer hook that acts
  after forward is announced there.
* *backward*: the first gradient of a synchronised backward has come. A shadow reduces every bucket
  with zeros and with flags that neither claim nor miss a gradient, so that it does not affect
  the unused parameters of the others. It gets the averaged gradients like every rank, for a sharded
  optimizer in the same context to step with; when the context ends they are gone.

A forward without synchronisation (`no_sync`, `torch.no_grad`) announces nothing. A context that
throws has nothing to shadow, and hears of each forward that communicates, so that the error
comes before anything was computed.

In the end the last joiner's module is sent to all, and its optimizer's state if the context was
given the optimizer: without, a rank that ran out early keeps the momentum of its own last step, and
the replicas would drift apart in the next epoch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.objects import broadcast_object_list
from dure.errors import CommError, ModuleError, PeerLost
from dure.training.join import Join, Joinable, JoinHook, JoinRound
from dure.training.pytrees import mapped

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.parallel.ddp.reducer import Reducer

__all__ = ["JoinableReplica"]

_FORWARD, _BUFFERS, _LATE_BUFFERS, _BACKWARD = range(4)


class JoinableReplica(Joinable):
    """What DDP adds to a module so that it can join; DDP is the only one that derives from it."""

    module: torch.nn.Module
    process_group: ProcessGroup
    require_forward_param_sync: bool
    _divide_by_all = True
    _authoritative_rank = 0
    """Whose module all ranks got at the end of the last context (torch's name)."""

    @property
    @abstractmethod
    def reducer(self) -> Reducer:
        """The part that averages gradients."""

    @abstractmethod
    def shadow_buffers(self, root: int) -> None:
        """Take part in what the others do with their buffers before a forward."""

    @abstractmethod
    def shadow_late_buffers(self) -> None:
        """Take part in what the others do with their buffers after a forward."""

    @abstractmethod
    def broadcast_module_from(self, root: int) -> None:
        """Overwrite parameters and buffers with those of the group rank `root`. Collective."""

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Join:
        """Return a context for a loop in which ranks may have different numbers of batches.

        A rank that runs out of batches waits at the end of the block, takes part in the others'
        reductions with zeros, and has the same module as they in the end, without gradients.

        Args:
            divide_by_initial_world_size: Divide sums of gradients by the number of all ranks, so
                that each sample has the weight that it had before; False divides by the ranks that
                still have inputs, as a smaller world would. With a communication hook, which
                divides by the number of ranks itself, its result is scaled to the same effect.
            enable: False makes the context do nothing.
            throw_on_early_termination: Raise `UnevenInputs` on all ranks once one runs out.
            optimizer: The optimizer whose state shall be equal on all ranks in the end (not torch's
                argument). Needed if it has state, such as momentum, and training continues.

        Raises:
            ModuleError: The module has layers that communicate on their own (`SyncBatchNorm`) and
                no rank would shadow them; pass `throw_on_early_termination=True`.

        Collective:
            As `Join`.

        Cost:
            A backward costs one all_reduce of 4 n bytes more, and so does a broadcast of buffers;
            the end, one broadcast for each large parameter and one for all small ones of a dtype.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
            optimizer=optimizer,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for one context; see `join` for the arguments it knows."""
        self._divide_by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        return _Shadow(self, kwargs.get("optimizer"))

    @property
    def join_device(self) -> torch.device:
        """The device of the module's first parameter."""
        return next(self.module.parameters()).device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group that averages the gradients."""
        return self.process_group

    # ---------------------------------------------------------------- announcing

    def _announce(self, phase: int) -> JoinRound | None:
        """Announce the next phase; a context that throws hears of forwards alone."""
        slot = self.join_slot
        if slot is None or slot.context.throw_on_early_termination != (phase == _FORWARD):
            return None
        return Join.notify_join_context(self, phase)

    def announce_forward(self, communicates: bool) -> None:
        """Let a context that shall throw do so; `communicates`: this step needs the others."""
        if communicates:
            self._announce(_FORWARD)

    def announce_buffers(self) -> int:
        """Say that buffers will be broadcast; return the group rank that they come from."""
        round = self._announce(_BUFFERS)
        if round is not None:
            return round.active[-1]
        return 0 if self.join_slot is None else self.process_group.size() - 1

    def announce_late_buffers(self) -> None:
        """Say that a buffer hook will run after this forward."""
        self._announce(_LATE_BUFFERS)

    def announce_backward(self) -> int | None:
        """Say that buckets will be reduced; return what to divide sums by, if not by all ranks."""
        round = self._announce(_BACKWARD)
        return None if round is None else self.divisor_of(round)

    def explain(self, error: CommError) -> None:
        """Say in an error outside of a context that uneven inputs would look like it."""
        killed = isinstance(error, PeerLost) and "signal" in (error.exit or error.seen)
        steps = self.reducer.num_reduced
        if self.join_slot is None and steps and not killed:
            completed = "1 step was" if steps == 1 else f"{steps} steps were"
            error.advise(
                f"{completed} completed before: if ranks have different numbers of batches, put "
                "the loop into `with ddp.join():` (docs/uneven.md)."
            )

    def divisor_of(self, round: JoinRound) -> int | None:
        """Return the number of ranks that have inputs, where it is what sums are divided by."""
        few = not self._divide_by_all and len(round.active) < len(round.codes)
        return len(round.active) if few else None


class _Shadow(JoinHook):
    """DDP's hook on a rank without inputs."""

    def __init__(self, ddp: JoinableReplica, optimizer: torch.optim.Optimizer | None) -> None:
        self._ddp, self._optimizer = ddp, optimizer

    def enter(self, context: Join) -> None:
        if not context.throw_on_early_termination and context.group.size() > 1:
            _refuse_lonely_layers(self._ddp.module)

    def shadow(self, phase: int, round: JoinRound) -> None:
        ddp = self._ddp
        if phase == _BUFFERS:
            ddp.shadow_buffers(round.active[-1])
        elif phase == _LATE_BUFFERS:
            ddp.shadow_late_buffers()
        elif phase == _BACKWARD:
            ddp.reducer.reductions.divisor = ddp.divisor_of(round)
            ddp.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        ddp = self._ddp
        slot = ddp.join_slot
        assert slot is not None
        last = slot.context.last_joiners
        ddp.reducer.reductions.divisor = None
        ddp._authoritative_rank = last[-1]  # pyright: ignore[reportPrivateUsage]
        if not is_last_joiner:
            # A loop that ends its steps with zero_grad() would add to what shadowing left.
            ddp.module.zero_grad(set_to_none=True)
        ddp.broadcast_module_from(last[-1])
        ddp.require_forward_param_sync = True
        if self._optimizer is not None and len(last) < ddp.process_group.size():
            _broadcast_optimizer(ddp.process_group, self._optimizer, last[-1])


def _refuse_lonely_layers(root: torch.nn.Module) -> None:
    """Raise if `root` has layers whose communication no rank would shadow."""
    layers = {name: m for name, m in root.named_modules() if hasattr(m, "communicates_in_forward")}
    if layers:
        raise ModuleError(
            "the module has layers that communicate in forward, which a rank without inputs "
            "cannot shadow",
            seen=", ".join(f"{name} ({type(m).__name__})" for name, m in layers.items()),
            fix="Use join(throw_on_early_termination=True), or give all ranks as many batches.",
        )


def _broadcast_optimizer(group: ProcessGroup, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Overwrite an optimizer's state and settings with those of the group rank `root`.

    Collective:
        All ranks of the group.

    Cost:
        One broadcast of a pickle with what is no tensor, and one for each tensor of the state.
    """
    state: Any = optimizer.state_dict()
    outline = [mapped(state, lambda t: t.to("meta"))]
    device = {p.device for g in optimizer.param_groups for p in g["params"]}.pop()
    broadcast_object_list(outline, group=group, group_src=root)
    tensors: list[torch.Tensor] = []
    if group.rank() == root:
        mapped(state, lambda t: tensors.append(t) or t)
    else:

        def empty(like: torch.Tensor) -> torch.Tensor:
            tensors.append(torch.empty_like(like, device=device if like.dim() else "cpu"))
            return tensors[-1]

        state = mapped(outline[0], empty)
    for tensor in tensors:
        reached = tensor
        if tensor.device.type not in group.device_types:  # a count of steps on the CPU, over NCCL
            reached = tensor.to(group.message_device)
        group.broadcast(reached, root)
        if reached is not tensor:
            tensor.copy_(reached)
    if group.rank() != root:
        optimizer.load_state_dict(state)
