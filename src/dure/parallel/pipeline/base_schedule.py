"""Schedules and their steps: torch's base classes over one runtime.

A schedule has a list of actions (`dure.schedules`) for each rank; a subclass chooses the lists
(`schedules`). Everything else is the same for all schedules: lists get their transfers and are
checked, a batch is cut into microbatches, the `Executor` carries out this rank's list, losses and
outputs are put together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dure.errors import ModuleError, UsageError
from dure.parallel.pipeline.executor import Batch, Executor, LossFn, PipelineOptions
from dure.parallel.pipeline.launch_order import check_launch_order
from dure.parallel.pipeline.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from dure.parallel.pipeline.stage import PipelineStage
from dure.parallel.pipeline.tying import TiedParameters
from dure.schedules import (
    Action,
    Kind,
    Schedule,
    lower,
    make_schedule,
    prove_no_deadlock,
    read_csv,
    validate,
    write_csv,
)

__all__ = [
    "PipelineContext",
    "PipelineSchedule",
    "PipelineScheduleMulti",
    "PipelineScheduleRuntime",
    "PipelineScheduleSingle",
]

Order = dict[int, list[Action | None]]
_FORWARD = frozenset({Kind.FORWARD, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD})


@dataclass(slots=True, kw_only=True)
class PipelineContext:
    """What a function that was registered for a kind of action gets beside the action.

    Attributes:
        schedule_ref: The schedule.
        arg_mbs, kwarg_mbs, target_mbs: Of each microbatch.
        losses: The list that was given to `step`.
        run: Carries out an action as it is done without the function.

    Obtained from:
        A function of `PipelineSchedule.register_custom_function` is called with it.
    """

    schedule_ref: PipelineSchedule
    arg_mbs: Sequence[tuple[Any, ...]]
    kwarg_mbs: Sequence[dict[str, Any]]
    target_mbs: Sequence[Any] | None
    losses: list[torch.Tensor] | None
    run: Callable[[Action], None]


class PipelineSchedule:
    """What all schedules share; see `PipelineScheduleMulti` for the arguments.

    Attributes:
        scale_grads: Losses are divided by the number of microbatches before backward.
        pipeline_order: For each rank its computations, with None where it idles.
        pipeline_order_with_comms: For each rank all its actions.

    Obtained from:
        Its subclasses, such as `Schedule1F1B`.
    """

    name: str | None = None
    """Of the lists of actions in `dure.schedules`; None: a subclass sets `pipeline_order` or
    `pipeline_order_with_comms`, or they are read from a file."""
    _backward_requires_autograd = True
    _defer_pp_recv = False

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None,
        specs: tuple[Any, Any, Any],
        scale_grads: bool,
        options: PipelineOptions | None,
    ) -> None:
        self._stages = sorted(stages, key=lambda stage: stage.stage_index)
        self._n_microbatches, self._loss_fn = n_microbatches, loss_fn
        self._args_chunk_spec, self._kwargs_chunk_spec, self._output_merge_spec = specs
        self.scale_grads, self._options = scale_grads, options or PipelineOptions()
        self._has_backward = loss_fn is not None
        first = self._stages[0]
        self._group, self.rank = first.group, first.group_rank
        self._num_stages, self.pp_group_size = first.num_stages, first.group_size
        self._losses: list[torch.Tensor] | None = None
        self._tied: TiedParameters | None = None
        self._executor: Executor | None = None
        self._actions: list[Action] = []
        self.pipeline_order: Order = {}
        self.pipeline_order_with_comms: dict[int, list[Action]] = {}
        if self.name is not None:
            made = make_schedule(
                self.name,
                stages=self._num_stages,
                microbatches=n_microbatches,
                ranks=self.pp_group_size,
            )
            self.pipeline_order = {r: list(actions) for r, actions in enumerate(made.ranks)}
            self._use(self._lower(made))

    # ---------------------------------------------------------------- the lists of actions

    def _prepare_schedule_with_comms(
        self,
        actions: Mapping[int, Sequence[Action | None]],
        format: Literal["compute_only", "compute_comms"] = "compute_only",
    ) -> None:
        """Take lists of actions; add what they lack, and prove that they come to an end."""
        schedule = Schedule.of_lists([actions[rank] for rank in sorted(actions)])
        if format == "compute_only":
            schedule = self._lower(schedule)
        self._use(schedule)

    def _lower(self, schedule: Schedule) -> Schedule:
        stages = range(self._num_stages)
        return lower(schedule, sharded=stages, defer_receives=self._defer_pp_recv)

    def _use(self, schedule: Schedule) -> None:
        mine = [stage.stage_index for stage in self._stages]
        wanted = [] if self.rank >= len(schedule.ranks) else list(schedule.stages_of(self.rank))
        seen = (len(schedule.ranks), schedule.stages, schedule.microbatches, wanted)
        given = (self.pp_group_size, self._num_stages, self._n_microbatches, mine)
        if seen != given:
            raise UsageError(
                "the schedule does not fit the stages of this rank, or the microbatches",
                op=type(self).__name__,
                group=self._group.group_name,
                rank=self.rank,
                world_size=self.pp_group_size,
                seen="ranks, stages, microbatches, and this rank's stages are {}, {}, {}, {}; the "
                "schedule is for {}, {}, {}, {}".format(*given, *seen),
                fix=f"Give rank {self.rank} the stages {wanted} of {schedule.stages}.",
            )
        validate(schedule)
        prove_no_deadlock(schedule)
        if self._group.orders_by_stream(self._stages[0].device.type):
            check_launch_order(schedule, type(self).__name__, self._group.device_types)
        self.pipeline_order_with_comms = {
            rank: schedule.actions(rank) for rank in range(len(schedule.ranks))
        }
        self._actions = self.pipeline_order_with_comms[self.rank]
        self._executor = Executor(
            self._stages,
            schedule.placement,
            self._n_microbatches,
            self._group,
            self._loss_fn,
            self._options,
        )

    def _ready(self) -> Executor:
        """Return the runtime; of lists that a subclass has set it is made now."""
        if self._executor is None and self.pipeline_order_with_comms:
            self._prepare_schedule_with_comms(self.pipeline_order_with_comms, "compute_comms")
        elif self._executor is None:
            self._prepare_schedule_with_comms(self.pipeline_order)
        assert self._executor is not None
        return self._executor

    def _load_csv(
        self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_only"
    ) -> None:
        """Read the lists of actions from a file: a row a rank, a cell an action.

        Args:
            filename: The file.
            format: With ``compute_comms`` it has sends and receives; else they are added.
        """
        schedule = read_csv(filename, format)
        if format == "compute_only":
            self.pipeline_order = {r: list(actions) for r, actions in enumerate(schedule.ranks)}
            schedule = self._lower(schedule)
        self._use(schedule)

    def _dump_csv(
        self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_comms"
    ) -> None:
        """Write the lists of actions to a file."""
        with_comms = format == "compute_comms"
        order = self.pipeline_order_with_comms if with_comms else self.pipeline_order
        write_csv(Schedule.of_lists([order[rank] for rank in sorted(order)]), filename)

    # ---------------------------------------------------------------- a step

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of a batch.

        Args:
            *args: The model's arguments, not cut: on the rank of the first stage.
            target: The loss function's second argument, not cut: on the rank of the last stage.
            losses: A list that is filled with the loss of each microbatch, on the rank of the last
                stage; on all with `PipelineOptions.losses_everywhere`.
            return_outputs: Keep the model's outputs.
            loss_kwargs: More arguments of the loss function.
            **kwargs: Those that the stages of this rank take.

        Returns:
            The model's outputs, on the rank of the last stage; else None.

        Raises:
            PipelineError: On all ranks: a stage raised. The group is intact, the next step works.
            CommError: A rank died; its message has the action that this rank was at.
            ModuleError: Gradients are switched off; `eval` is for that.
            ShapeError: The batch is smaller than the number of microbatches.

        Collective:
            All ranks of the group.
        """
        stages = self._stages
        arg_mbs = kwarg_mbs = target_mbs = None
        if kwargs or (args and stages[0].is_first):
            arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(
                args if stages[0].is_first else (),
                kwargs,
                self._n_microbatches,
                self._args_chunk_spec if stages[0].is_first else None,
                self._kwargs_chunk_spec,
            )
        if target is not None and stages[-1].is_last:
            cut, _ = split_args_kwargs_into_chunks((target,), None, self._n_microbatches)
            target_mbs = [one for (one,) in cut]
        outputs = self.step_microbatches(
            arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs
        )
        return None if outputs is None else merge_chunks(outputs, self._output_merge_spec)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forward of a batch, without gradients; at any time. See `step`."""
        before, self._has_backward = self._has_backward, False
        try:
            return self.step(*args, target=target, losses=losses, **kwargs)
        finally:
            self._has_backward = before

    def step_microbatches(
        self,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> list[Any] | None:
        """Run a step on microbatches that are cut already; their shapes may differ.

        Args:
            arg_mbs, kwarg_mbs: The arguments of each microbatch.
            target_mbs: The target of each.
            losses, return_outputs, loss_kwargs: As of `step`, which see.

        Returns:
            The outputs of each microbatch, on the rank of the last stage; else None.
        """
        self._check_microbatches(arg_mbs=arg_mbs, kwarg_mbs=kwarg_mbs, target_mbs=target_mbs)
        training = self._has_backward
        if training and self._backward_requires_autograd and not torch.is_grad_enabled():
            raise ModuleError(
                "step() needs gradients", seen="they are switched off", fix="Call eval()."
            )
        executor = self._ready()
        if self._tied is None:
            self._tied = TiedParameters(self._stages, self._group)
        batch = Batch(
            args=arg_mbs or [()] * self._n_microbatches,
            kwargs=kwarg_mbs or [{}] * self._n_microbatches,
            targets=target_mbs,
            loss_kwargs=loss_kwargs or {},
            training=training,
            keep_outputs=return_outputs,
        )
        self._losses = losses
        scale = 1 / self._n_microbatches if self.scale_grads else 1.0
        with torch.set_grad_enabled(training and torch.is_grad_enabled()):
            self._run(executor, batch, scale)
        if losses is not None and batch.losses:
            losses[:] = [batch.losses[i] for i in sorted(batch.losses)]
        last = self._stages[-1]
        outputs = last.output_chunks if last.is_last and return_outputs else None
        for stage in self._stages:
            stage.clear_runtime_states()
        return outputs

    _step_microbatches = step_microbatches  # torch's name

    def _run(self, executor: Executor, batch: Batch, scale: float) -> None:
        assert self._tied is not None
        if not batch.training:
            executor.run(_forward_only(self._actions), batch, scale)
            return
        self._tied.begin()
        try:
            executor.run(self._actions, batch, scale)
        except BaseException:
            self._tied.end(is_whole=False)
            raise
        self._tied.end(is_whole=True)

    def _check_microbatches(self, **given: Sequence[Any] | None) -> None:
        for name, each in given.items():
            if each is not None and len(each) != self._n_microbatches:
                raise UsageError(
                    "a step has another number of microbatches than its schedule",
                    seen=f"{len(each)} in {name}, expected {self._n_microbatches}",
                    fix=f"Make the schedule with n_microbatches={len(each)}.",
                )

    # ---------------------------------------------------------------- functions in place of actions

    def register_custom_function(
        self, computation_type: Kind, custom_function: Callable[[Action, PipelineContext], None]
    ) -> None:
        """Have a function called in place of the actions of a kind.

        Args:
            computation_type: The kind: any but sends and receives.
            custom_function: Called with the action and a `PipelineContext`.

        Raises:
            UsageError: The kind sends or receives.
        """
        if computation_type.is_send or computation_type.is_recv:
            raise UsageError(
                "sends and receives have no custom function", seen=str(computation_type)
            )
        executor = self._ready()

        def call(action: Action, batch: Batch) -> None:
            context = PipelineContext(
                schedule_ref=self,
                arg_mbs=batch.args,
                kwarg_mbs=batch.kwargs,
                target_mbs=batch.targets,
                losses=self._losses,
                run=executor.perform,
            )
            custom_function(action, context)

        executor.custom[computation_type] = call


def _forward_only(actions: Sequence[Action]) -> list[Action]:
    """Return what of a list is forward."""
    parts = [part for action in actions for part in action.parts]
    return [part for part in parts if part.kind in _FORWARD]


class PipelineScheduleSingle(PipelineSchedule):
    """A schedule of one stage a rank.

    Args:
        stage: This rank's.
        n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads,
            options: As of `PipelineScheduleMulti`.

    Obtained from:
        Its subclasses, such as `Schedule1F1B`.
    """

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        *,
        options: PipelineOptions | None = None,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__([stage], n_microbatches, loss_fn, specs, scale_grads, options)
        self._stage = stage


class PipelineScheduleMulti(PipelineSchedule):
    """A schedule of any number of stages per rank.

    Args:
        stages: This rank's.
        n_microbatches: How many a batch is cut into.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)`` of a microbatch; without one there is no
            backward.
        args_chunk_spec, kwargs_chunk_spec: How arguments are cut; None: along dimension 0.
        output_merge_spec: How outputs are put together; None: along dimension 0.
        use_full_backward: No effect; torch's argument.
        scale_grads: Divide losses by the number of microbatches before backward: for a loss that is
            a mean. Gradients of earlier steps that were not zeroed are left as they are.
        backward_requires_autograd: Refuse `step` where gradients are switched off.
        defer_pp_recv: Post receives as late as can be, not as early.
        options: Options that torch does not have.

    Raises:
        UsageError: The stages do not fit the schedule; says what would.

    Obtained from:
        Its subclasses, such as `ScheduleInterleaved1F1B`.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        options: PipelineOptions | None = None,
    ) -> None:
        del use_full_backward
        self._defer_pp_recv = defer_pp_recv
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stages, n_microbatches, loss_fn, specs, scale_grads, options)
        self._backward_requires_autograd = backward_requires_autograd


class PipelineScheduleRuntime(PipelineScheduleMulti):
    """A schedule whose lists a subclass gives, or a file (`_load_csv`).

    Example:
        ```python
        import os
        from dure import pipelining
        from dure.pipelining.schedules import _PipelineScheduleRuntime

        rank, device = dist.get_rank(), torch.device("cpu")
        lines = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]  # one for each rank
        Path("order.csv").write_text(os.linesep.join(lines))
        dist.barrier()
        stage = pipelining.PipelineStage(torch.nn.Linear(4, 4), rank, 2, device)
        schedule = _PipelineScheduleRuntime([stage], 2, torch.nn.functional.mse_loss)
        schedule._load_csv("order.csv")
        schedule.step(*([torch.ones(8, 4)] if rank == 0 else []), target=torch.zeros(8, 4))
        ```
    """
