"""The runtime: carries out a rank's list of actions, for any schedule.

    F                 wait for the stage's inputs; forward; of the last stage the loss
    B, or I and W     wait for the gradients of its outputs; backward, or its two halves
    SEND_F, SEND_B    hand outputs, or gradients of inputs, over: never waits
    RECV_F, RECV_B    post the receives: never waits
    UNSHARD, RESHARD, REDUCE_GRAD     of stages that are sharded or replicated over another axis
    OVERLAP_F_B       its parts, one after the other

A neighbour on the same rank gets the tensor itself, by F and B. So a rank waits only where it needs
a missing tensor, and if the schedule's order allows every rank's next computation, some
rank can continue. failures.py describes what happens when a stage raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.objects import all_gather_object
from dure.comm.ops import ReduceOp
from dure.comm.profiling import UNRECORDED, profiler, step
from dure.errors import CommError, PipelineError, UsageError
from dure.parallel.pipeline.failures import (
    FailureReport,
    Poisoned,
    error_of,
    place_in_schedule,
    report_of,
    verify_finite,
)
from dure.parallel.pipeline.layout import PackedPytree, pack, unpack
from dure.parallel.pipeline.messages import StageTransfers
from dure.parallel.pipeline.slots import SlotTransfers, has_slots
from dure.parallel.pipeline.stage import PipelineStage
from dure.schedules import Action, Kind
from dure.trace import logs, spans
from dure.training.pytrees import tensors_of

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Batch", "CustomFunction", "Executor", "LossFn", "PipelineOptions"]

_log = logs.logger("parallel")

LossFn = Callable[..., torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Batch:
    """What a step works on.

    Attributes:
        args, kwargs: Of each microbatch.
        targets: Of each microbatch, on the last stage's rank.
        loss_kwargs: Handed to the loss function.
        training: With a backward.
        keep_outputs: Whether the last stage's outputs are wanted.
        losses: Of each microbatch, as far as they are known.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    loss_kwargs: dict[str, Any]
    training: bool
    keep_outputs: bool
    losses: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """What torch's schedules have not.

    Attributes:
        losses_everywhere: `losses` is filled on every rank; it costs nothing, as it rides on the
            exchange that ends a step.
        nan_watch: Outputs, gradients and losses of every stage are looked at; where one is not
            finite, all ranks raise, and name stage, microbatch and action.

    Example:
        ```python
        from dure import pipelining

        options = pipelining.PipelineOptions(losses_everywhere=True, nan_watch=True)
        # pipelining.ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss, options=options)
        ```
    """

    losses_everywhere: bool = False
    nan_watch: bool = False


CustomFunction = Callable[[Action, Batch], None]


class Executor:
    """Carries out the actions of this rank.

    Threads:
        One; a step at a time.

    Args:
        stages: Of this rank.
        placement: The rank of each stage.
        microbatches: How many a step has.
        group: The ranks of the pipeline.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)``.
        options: Whether all ranks get the losses, and NaNs are looked for.

    Attributes:
        custom: Called in place of actions of a kind.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        placement: Sequence[int],
        microbatches: int,
        group: ProcessGroup,
        loss_fn: LossFn | None,
        options: PipelineOptions,
    ) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self._group, self._rank = group, group.rank()
        self._loss_fn, self._nan_watch = loss_fn, options.nan_watch
        self._losses_everywhere = options.losses_everywhere
        self._microbatches = microbatches
        is_local = has_slots(group.backend_of("cpu"), stages[0].device)
        transport = SlotTransfers if is_local else StageTransfers
        self._messages = transport(group, placement, microbatches, stages[0].device)
        logs.decided(
            _log,
            self._rank,
            "pipeline of %d stages on %d ranks, %d microbatches: activations go through %s",
            *(len(placement), group.size(), microbatches),
            "shared memory" if transport is SlotTransfers else f"messages of {group.backend_name}",
        )
        self._live_losses: dict[int, torch.Tensor] = {}
        self._batch: Batch | None = None
        self._num_steps, self._waited_ns = 0, 0
        self.custom: dict[Kind, CustomFunction] = {}
        self._do: Mapping[Kind, Callable[[PipelineStage, int], None]] = {
            Kind.FORWARD: self._forward,
            Kind.FULL_BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_F: self._send_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_F: self._post_forward,
            Kind.RECV_B: self._post_backward,
            Kind.UNSHARD: lambda stage, _: stage.data_parallel.unshard(),
            Kind.RESHARD: lambda stage, _: stage.data_parallel.reshard(),
            Kind.REDUCE_GRAD: lambda stage, _: stage.data_parallel.reduce(),
        }

    # ---------------------------------------------------------------- a step

    def run(self, actions: Iterable[Action], batch: Batch, loss_scale: float) -> None:
        """Carry out a step.

        Raises:
            PipelineError: On all ranks: a stage raised. The group is intact. A rank whose stage was
                left by no `Exception` (KeyboardInterrupt, SystemExit) raises that.
            CommError: A rank died, or did not come in time.
        """
        self._batch = batch
        self._num_steps += 1
        self._messages.begin(batch.training)
        for stage in self._stages.values():
            stage.clear_runtime_states()
            stage.has_backward, stage.loss_scale = batch.training, loss_scale
            stage.data_parallel.begin(batch.training)
        failure: FailureReport | None = None
        cause: BaseException | None = None
        action = Action(-1, Kind.FORWARD)
        try:
            for action in actions:
                if failure is not None:
                    self._pass_on(action, failure)
                    continue
                try:
                    self._perform_timed(action)
                except CommError:
                    raise
                except Poisoned as poisoned:
                    failure = poisoned.report
                except BaseException as error:
                    failure, cause = report_of(error, self._rank, action), error
                if failure is not None:
                    self._pass_on(action, failure)
            self._end(failure, cause)
        except CommError as error:
            self._messages.abandon()
            place_in_schedule(error, action)
            _raise_interrupt(cause, error)
            raise
        except PipelineError:
            raise
        except BaseException:  # between two actions, or at the end: other ranks wait for this one
            self._messages.abandon()
            raise
        finally:
            self._batch = None
            self._live_losses.clear()

    def perform(self, action: Action) -> None:
        """Carry out one action as it is done where no function was registered for its kind."""
        if action.sub_actions is not None:
            for part in action.sub_actions:
                self.perform(part)
            return
        stage = self._stages.get(action.stage)
        if stage is None:
            raise UsageError(
                "the schedule has an action for a stage of another rank",
                seen=f"{action} on rank {self._rank}, which has {sorted(self._stages)}",
            )
        microbatch = -1 if action.microbatch is None else action.microbatch
        self._do[action.kind](stage, microbatch)

    def _perform_timed(self, action: Action) -> None:
        start_ns, self._waited_ns = time.monotonic_ns(), 0
        custom = self.custom.get(action.kind)
        with step(f"PP:{action}") if profiler._is_profiler_enabled else UNRECORDED:
            if custom is not None:
                assert self._batch is not None
                custom(action, self._batch)
            else:
                self.perform(action)
        if action.kind.is_compute:
            self._messages.release_completed()
        if spans.listeners:
            self._show(action, start_ns + self._waited_ns)

    def _show(self, action: Action, start_ns: int) -> None:
        """Show the action as long as it kept the rank busy: without what it waited for."""
        spans.emit(
            spans.Span(
                name=str(action),
                track=f"stage {action.parts[0].stage}",
                global_rank=self._group.global_ranks[self._rank],
                start_ns=start_ns,
                end_ns=time.monotonic_ns(),
                group=self._group.group_name,
                details={"action": str(action), "rank": self._rank, "step": self._num_steps},
            )
        )

    def _take(self, transfer: Action) -> PackedPytree:
        start_ns = time.monotonic_ns()
        packed = self._messages.take(transfer)
        self._waited_ns += time.monotonic_ns() - start_ns
        return packed

    # ---------------------------------------------------------------- computing

    def _forward(self, stage: PipelineStage, microbatch: int) -> None:
        batch = self._batch
        assert batch is not None
        index = stage.stage_index
        stage.data_parallel.wait()
        if not stage.is_first and index - 1 not in self._stages:
            stage.receive_forward(
                microbatch, self._take(Action(index - 1, Kind.SEND_F, microbatch))
            )
        output = stage.forward_one_chunk(
            microbatch, batch.args[microbatch], batch.kwargs[microbatch], batch.keep_outputs
        )
        if stage.is_last:
            self._compute_loss(output, microbatch)
        elif index + 1 in self._stages:
            self._stages[index + 1].receive_forward(microbatch, stage.take_outputs(microbatch))
        self._watch("the output", list(tensors_of(output)))

    def _compute_loss(self, output: Any, microbatch: int) -> None:
        batch = self._batch
        assert batch is not None
        if self._loss_fn is None or (batch.targets is None and not batch.training):
            return
        target = None if batch.targets is None else batch.targets[microbatch]
        loss = self._loss_fn(output, target, **batch.loss_kwargs)
        batch.losses[microbatch] = loss.detach()
        if batch.training:
            self._live_losses[microbatch] = loss
        self._watch("the loss", [loss])

    def _watch(self, what: str, tensors: Sequence[torch.Tensor | None]) -> None:
        if self._nan_watch:
            verify_finite(what, tensors)

    def _backward(self, stage: PipelineStage, microbatch: int, is_full: bool = True) -> None:
        index = stage.stage_index
        stage.data_parallel.wait()
        if not stage.is_last and index + 1 not in self._stages:
            packed = self._take(Action(index + 1, Kind.SEND_B, microbatch))
            stage.receive_backward(microbatch, unpack(packed))
        loss = self._live_losses.pop(microbatch, None) if stage.is_last else None
        stage.backward_one_chunk(microbatch, loss, is_full)
        if not stage.is_first and index - 1 in self._stages:
            gradients = stage.take_gradients(microbatch)
            self._watch("the gradient of input", gradients)
            self._stages[index - 1].receive_backward(microbatch, gradients)

    def _backward_input(self, stage: PipelineStage, microbatch: int) -> None:
        self._backward(stage, microbatch, is_full=False)

    def _backward_weight(self, stage: PipelineStage, microbatch: int) -> None:
        stage.data_parallel.wait()
        stage.backward_weight_one_chunk(microbatch)

    # ---------------------------------------------------------------- handing over

    def _send_forward(self, stage: PipelineStage, microbatch: int) -> None:
        packed = stage.take_outputs(microbatch)
        self._messages.send(Action(stage.stage_index, Kind.SEND_F, microbatch), packed)

    def _send_backward(self, stage: PipelineStage, microbatch: int) -> None:
        gradients = stage.take_gradients(microbatch)
        self._watch("the gradient of input", gradients)
        self._messages.send(Action(stage.stage_index, Kind.SEND_B, microbatch), pack(gradients))

    def _post_forward(self, stage: PipelineStage, microbatch: int) -> None:
        self._messages.post(Action(stage.stage_index - 1, Kind.SEND_F, microbatch))

    def _post_backward(self, stage: PipelineStage, microbatch: int) -> None:
        self._messages.post(Action(stage.stage_index + 1, Kind.SEND_B, microbatch))

    # ---------------------------------------------------------------- failures, and a step's end

    def _pass_on(self, action: Action, failure: FailureReport) -> None:
        """Do the part of an action of a failed step that other ranks wait for."""
        for part in action.parts:
            microbatch = -1 if part.microbatch is None else part.microbatch
            if part.kind.is_send:
                self._messages.send_poison(part, failure)
            elif part.kind.is_recv:
                self._do[part.kind](self._stages[part.stage], microbatch)

    def _end(self, failure: FailureReport | None, cause: BaseException | None) -> None:
        """Tell each other how the step went; all raise if a rank failed."""
        if not self._exchange(failure is not None):
            self._messages.finish()
            return
        self._messages.drain()
        for stage in self._stages.values():
            stage.data_parallel.forget()
        reports: list[FailureReport | None] = [None] * self._group.size()
        all_gather_object(reports, failure if cause is not None else None, self._group)
        found = [report for report in reports if report is not None]
        _raise_interrupt(cause)
        error = error_of(found, self._group.group_name, self._rank, self._group.size())
        raise error from cause

    def _exchange(self, has_failed: bool) -> bool:
        """Return whether a rank has failed; send all ranks the losses, if that was asked for."""
        batch = self._batch
        assert batch is not None
        room = 2 * self._microbatches if self._losses_everywhere else 0
        status = torch.zeros(1 + room, dtype=torch.float64, device="cpu")
        status[0] = has_failed
        if self._losses_everywhere and self._last_is_here:
            for microbatch, loss in batch.losses.items():
                status[1 + 2 * microbatch] = 1
                status[2 + 2 * microbatch] = loss
        status = status.to(self._messages.header_device)
        self._group.all_reduce(status, ReduceOp.SUM)
        failed, *known = status.tolist()
        if not self._last_is_here:
            for i in range(self._microbatches if known else 0):
                if known[2 * i]:
                    batch.losses[i] = torch.tensor(
                        known[2 * i + 1], dtype=torch.float64, device="cpu"
                    )
        return failed > 0

    @property
    def _last_is_here(self) -> bool:
        return any(stage.is_last for stage in self._stages.values())


def _raise_interrupt(cause: BaseException | None, error: CommError | None = None) -> None:
    """Raise what left a stage as it is, if it is no `Exception`: KeyboardInterrupt, SystemExit."""
    if cause is not None and not isinstance(cause, Exception):
        raise cause from error
