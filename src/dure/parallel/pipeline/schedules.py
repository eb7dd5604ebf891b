"""The schedules that have names: torch's classes and arguments.

A class names its lists of actions in `dure.schedules`; `base_schedule` does the rest.
"""

from __future__ import annotations

from typing import Any

from dure.parallel.pipeline.base_schedule import (
    PipelineSchedule,
    PipelineScheduleMulti,
    PipelineScheduleRuntime,
    PipelineScheduleSingle,
)
from dure.parallel.pipeline.executor import LossFn, PipelineOptions
from dure.parallel.pipeline.microbatch import TensorChunkSpec
from dure.parallel.pipeline.stage import PipelineStage
from dure.schedules import find_generator

__all__ = [
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleForwardOnly",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "get_schedule_class",
]


class _Named(PipelineScheduleRuntime):
    """A schedule of torch that has a name; it has no `use_full_backward`."""

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        options: PipelineOptions | None = None,
    ) -> None:
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            None,
            scale_grads,
            backward_requires_autograd,
            defer_pp_recv,
            options=options,
        )


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards.

    Args:
        stage: This rank's.
        n_microbatches: How many a batch is cut into.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)`` of a microbatch; without one there is no
            backward.
        args_chunk_spec, kwargs_chunk_spec: How arguments are cut; None: along dimension 0.
        output_merge_spec: How outputs are put together; None: along dimension 0.
        scale_grads: Divide losses by the number of microbatches before backward, for a loss that is
            a mean.
        options: Options that torch does not have.

    Raises:
        UsageError: The stage does not fit the schedule; the message says what would.

    Cost:
        Each rank is idle for (P - 1) / (M + P - 1) of a step, with P equal stages and M
        microbatches, and holds the activations of M microbatches.

    Example:
        ```python
        from dure import pipelining

        rank = dist.get_rank()
        stage = pipelining.PipelineStage(torch.nn.Linear(4, 4), rank, 2, torch.device("cpu"))
        schedule = pipelining.ScheduleGPipe(stage, 4, torch.nn.functional.mse_loss)
        if rank == 0:
            schedule.step(torch.ones(8, 4))
        else:
            losses = []
            schedule.step(target=torch.zeros(8, 4), losses=losses)
            assert len(losses) == 4  # one per microbatch
        ```
    """

    name = "gpipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward and one backward alternately, as soon as the pipeline is full.

    Args:
        stage: This rank's.
        n_microbatches: How many a batch is cut into.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)`` of a microbatch; without one there is no
            backward.
        args_chunk_spec, kwargs_chunk_spec: How arguments are cut; None: along dimension 0.
        output_merge_spec: How outputs are put together; None: along dimension 0.
        scale_grads: Divide losses by the number of microbatches before backward, for a loss that is
            a mean.
        options: Options that torch does not have.

    Raises:
        UsageError: The stage does not fit the schedule; the message says what would.

    Cost:
        Each rank is idle for (P - 1) / (M + P - 1) of a step, with P equal stages and M
        microbatches, and holds the activations of at most P microbatches.

    Example:
        ```python
        stage = pipelining.PipelineStage(torch.nn.Linear(4, 4), rank, 2, torch.device("cpu"))
        schedule = pipelining.Schedule1F1B(stage, 4, torch.nn.functional.mse_loss)
        if rank == 0:
            schedule.step(torch.ones(8, 4))
        else:
            output = schedule.step(target=torch.zeros(8, 4))
            assert output.shape == (8, 4)
        ```
    """

    name = "1f1b"


class ScheduleForwardOnly(PipelineScheduleSingle):
    """Forwards without a backward.

    Args:
        stage: This rank's.
        n_microbatches: How many a batch is cut into.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)`` of a microbatch; without one there is no
            backward.
        args_chunk_spec, kwargs_chunk_spec: How arguments are cut; None: along dimension 0.
        output_merge_spec: How outputs are put together; None: along dimension 0.
        scale_grads: Divide losses by the number of microbatches before backward, for a loss that is
            a mean.
        options: Options that torch does not have.

    Raises:
        UsageError: The stage does not fit the schedule; the message says what would.

    Example:
        ```python
        from dure.pipelining.schedules import _ScheduleForwardOnly

        schedule = _ScheduleForwardOnly(stage, 4)
        schedule.step(*([torch.ones(8, 4)] if rank == 0 else []))
        ```
    """

    name = "forward-only"


class ScheduleInterleaved1F1B(_Named):
    """1F1B with several stages per rank: less idle time, more transfers.

    Args:
        stages: This rank's.
        n_microbatches: How many a batch is cut into.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)`` of a microbatch; without one there is no
            backward.
        args_chunk_spec, kwargs_chunk_spec: How arguments are cut; None: along dimension 0.
        output_merge_spec: How outputs are put together; None: along dimension 0.
        scale_grads: Divide losses by the number of microbatches before backward, for a loss that is
            a mean.
        backward_requires_autograd: Refuse `step` if gradients are switched off.
        defer_pp_recv: Post receives as late as possible, not as early.
        options: Options that torch does not have.

    Raises:
        UsageError: The stages do not fit the schedule; the message says what would.

    Example:
        ```python
        def two_stages(*, v_shaped=False):
            numbers = (rank, 3 - rank) if v_shaped else (rank, rank + 2)
            device = torch.device("cpu")
            return [
                pipelining.PipelineStage(torch.nn.Linear(4, 4), number, 4, device)
                for number in numbers
            ]

        schedule = pipelining.ScheduleInterleaved1F1B(two_stages(), 4, torch.nn.functional.mse_loss)
        if rank == 0:  # has stages 0 and 2
            schedule.step(torch.ones(8, 4))
        else:  # has stages 1 and 3
            schedule.step(target=torch.zeros(8, 4))
        ```
    """

    name = "interleaved-1f1b"


class ScheduleInterleavedZeroBubble(_Named):
    """Interleaved 1F1B that computes gradients of weights in idle time.

    Args:
        stages: This rank's.
        n_microbatches: How many a batch is cut into.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)`` of a microbatch; without one there is no
            backward.
        args_chunk_spec, kwargs_chunk_spec: How arguments are cut; None: along dimension 0.
        output_merge_spec: How outputs are put together; None: along dimension 0.
        scale_grads: Divide losses by the number of microbatches before backward, for a loss that is
            a mean.
        backward_requires_autograd: Refuse `step` if gradients are switched off.
        defer_pp_recv: Post receives as late as possible, not as early.
        options: Options that torch does not have.

    Raises:
        UsageError: The stages do not fit the schedule; the message says what would.

    Example:
        ```python
        loss = torch.nn.functional.mse_loss
        schedule = pipelining.ScheduleInterleavedZeroBubble(two_stages(), 4, loss)
        schedule.step(*([torch.ones(8, 4)] if rank == 0 else []), target=torch.zeros(8, 4))
        ```
    """

    name = "interleaved-zero-bubble"


class ScheduleZBVZeroBubble(_Named):
    """Two stages per rank, in V order; gradients of weights are computed in idle time.

    Args:
        stages: This rank's.
        n_microbatches: How many a batch is cut into.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)`` of a microbatch; without one there is no
            backward.
        args_chunk_spec, kwargs_chunk_spec: How arguments are cut; None: along dimension 0.
        output_merge_spec: How outputs are put together; None: along dimension 0.
        scale_grads: Divide losses by the number of microbatches before backward, for a loss that is
            a mean.
        backward_requires_autograd: Refuse `step` if gradients are switched off.
        defer_pp_recv: Post receives as late as possible, not as early.
        options: Options that torch does not have.

    Raises:
        UsageError: The stages do not fit the schedule; the message says what would.

    Example:
        ```python
        schedule = pipelining.ScheduleZBVZeroBubble(two_stages(v_shaped=True), 4, loss)
        schedule.step(*([torch.ones(8, 4)] if rank == 0 else []), target=torch.zeros(8, 4))
        ```
    """

    name = "zb-v"


class ScheduleDualPipeV(_Named):
    """Two stages per rank, in V order, with forwards and backwards side by side.

    Args:
        stages: This rank's.
        n_microbatches: How many a batch is cut into.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)`` of a microbatch; without one there is no
            backward.
        args_chunk_spec, kwargs_chunk_spec: How arguments are cut; None: along dimension 0.
        output_merge_spec: How outputs are put together; None: along dimension 0.
        scale_grads: Divide losses by the number of microbatches before backward, for a loss that is
            a mean.
        backward_requires_autograd: Refuse `step` if gradients are switched off.
        defer_pp_recv: Post receives as late as possible, not as early.
        options: Options that torch does not have.

    Raises:
        UsageError: The stages do not fit the schedule; the message says what would.

    Example:
        ```python
        schedule = pipelining.ScheduleDualPipeV(two_stages(v_shaped=True), 4, loss)
        schedule.step(*([torch.ones(8, 4)] if rank == 0 else []), target=torch.zeros(8, 4))
        ```
    """

    name = "dualpipe-v"


class ScheduleLoopedBFS(_Named):
    """Several stages per rank; all microbatches pass through one stage before the next.

    Args:
        stages: This rank's.
        n_microbatches: How many a batch is cut into.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)`` of a microbatch; without one there is no
            backward.
        output_merge_spec: How outputs are put together; None: along dimension 0.
        scale_grads: Divide losses by the number of microbatches before backward, for a loss that is
            a mean.
        backward_requires_autograd: Refuse `step` if gradients are switched off.
        defer_pp_recv: Post receives as late as possible, not as early.
        options: Options that torch does not have.

    Raises:
        UsageError: The stages do not fit the schedule; the message says what would.

    Example:
        ```python
        schedule = pipelining.ScheduleLoopedBFS(two_stages(), 4, loss)
        schedule.step(*([torch.ones(8, 4)] if rank == 0 else []), target=torch.zeros(8, 4))
        ```
    """

    name = "looped-bfs"

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        options: PipelineOptions | None = None,
    ) -> None:
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
            options=options,
        )


_BASES = {
    "pipelineschedulesingle": PipelineScheduleSingle,
    "pipelineschedulemulti": PipelineScheduleMulti,
}
_CLASSES = {
    kind.name: kind
    for kind in (
        ScheduleGPipe,
        Schedule1F1B,
        ScheduleInterleaved1F1B,
        ScheduleLoopedBFS,
        ScheduleInterleavedZeroBubble,
        ScheduleZBVZeroBubble,
        ScheduleDualPipeV,
        ScheduleForwardOnly,
    )
}


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """Return the class of a schedule by torch's name, or that in `dure.schedules`, in any case.

    Args:
        schedule_name: The name, such as "1F1B" or "zb-v".

    Returns:
        The class.

    Raises:
        UsageError: There is none (a ValueError).

    Example:
        ```python
        from dure import pipelining
        from dure.pipelining.schedules import get_schedule_class

        assert get_schedule_class("1f1b") is pipelining.Schedule1F1B
        ```
    """
    base = _BASES.get(schedule_name.lower())
    return base or _CLASSES[find_generator(schedule_name).name]
