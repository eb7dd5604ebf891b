"""Pipelines: what they compute is what one process computes; options and misfits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dure
import dure.pipelining as pp
from dure.errors import ModuleError, ScheduleError, ShapeError, UsageError
from dure.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from dure.testing import run_ranks
from tests.parallel.pipeline.ranks.pipeline_models import (
    CPU,
    SCHEDULES,
    Pipeline,
    Trained,
    batches,
    dense,
    mse,
    one_process,
    verify_same,
)


def _train(
    rank: int, name: str, world: int, parts: list[nn.Module], num: int, **kwargs: Any
) -> Trained:
    pipeline = Pipeline(name, rank, world, parts, num, **kwargs)
    losses = []
    for x, y in batches(2):
        before = pipeline.eval(x)  # between steps, and of other layouts
        losses.append(pipeline.step(x, y))
        assert before is None or not before.requires_grad
    return losses, pipeline.weights()


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_train_as_one_process(name: str):
    """Worlds of 1 to 3 ranks, unbuffered sends, microbatches of 3 and 2 rows."""
    each = SCHEDULES[name][1]
    for world in (1, 2, 3):
        num = 6 if name == "dualpipe-v" else 4
        parts = dense(world * each)
        found = run_ranks(world, _train, name, world, parts, num, eager_bytes=0)
        verify_same(found, one_process(parts, batches(2), num))


def test_messages_over_gloo_and_deferred_receives_on_2_ranks():
    parts = dense(4)

    def train(rank: int) -> Trained:
        return _train(rank, "interleaved", 2, parts, 4, defer_pp_recv=True)

    verify_same(run_ranks(2, train, backend="gloo"), one_process(parts, batches(2), 4))


# ---------------------------------------------------------------- options


def _of_losses(rank: int, parts: list[nn.Module]) -> tuple[list[float], list[float]]:
    options = pp.PipelineOptions(losses_everywhere=True)
    pipeline = Pipeline("interleaved", rank, 2, parts, 4, options=options)
    x, y = batches(1)[0]
    trained = pipeline.step(x, y)
    losses: list[torch.Tensor] = []
    pipeline.schedule.eval(*([x] if rank == 0 else []), target=y, losses=losses)
    return trained, [loss.item() for loss in losses]


def test_losses_are_known_on_all_ranks_if_asked_for_on_2_ranks():
    (trained, evaluated), other = run_ranks(2, _of_losses, dense(4))
    assert len(trained) == len(evaluated) == 4
    assert other == (trained, evaluated) and trained != evaluated


def _with_custom_actions(rank: int, parts: list[nn.Module]) -> Trained:
    pipeline = Pipeline("dualpipe-v", rank, 2, parts, 8)
    seen: list[str] = []

    def both(action: Any, context: Any) -> None:
        for part in action.sub_actions:
            seen.append(str(part))
            context.run(part)

    kind = _ComputationType.OVERLAP_F_B
    pipeline.schedule.register_custom_function(kind, both)
    losses = [pipeline.step(*batches(1, rows=16)[0])]
    assert seen and {text[1] for text in seen} <= set("FBIW")
    with pytest.raises(UsageError):
        pipeline.schedule.register_custom_function(_ComputationType.SEND_F, both)
    return losses, pipeline.weights()


def test_registered_functions_take_the_place_of_actions_on_2_ranks():
    parts = dense(4)
    found = run_ranks(2, _with_custom_actions, parts)
    verify_same(found, one_process(parts, batches(1, rows=16), 8))


def _with_file(rank: int, parts: list[nn.Module], folder: Any) -> Trained:
    made: Any = Pipeline("zero-bubble", rank, 2, parts, 4)
    losses = []
    for kind in ("compute_only", "compute_comms"):
        file = str(folder / f"{kind}{rank}.csv")
        made.schedule._dump_csv(file, format=kind)
        read: Any = _PipelineScheduleRuntime(made.stages, 4, loss_fn=mse)
        read._load_csv(file, format=kind)
        assert read.pipeline_order_with_comms == made.schedule.pipeline_order_with_comms
        made.schedule = read
        losses.append(made.step(*batches(1)[0]))
    own: Any = _PipelineScheduleRuntime(made.stages, 4, loss_fn=mse)
    texts = {r: [str(action) for action in read.pipeline_order_with_comms[r]] for r in (0, 1)}
    own.pipeline_order_with_comms = {r: [_Action.from_str(t) for t in texts[r]] for r in texts}
    assert _Action.from_str(" ") is None
    made.schedule = own
    losses.append(made.step(*batches(1)[0]))
    return losses, made.weights()


def test_schedules_are_written_read_and_set_on_2_ranks(tmp_path: Any):
    parts = dense(4)
    found = run_ranks(2, _with_file, parts, tmp_path)
    verify_same(found, one_process(parts, batches(1) * 3, 4))


def test_schedule_classes_are_found_by_name():
    assert get_schedule_class("1f1b") is pp.Schedule1F1B
    assert get_schedule_class("zbvzerobubble") is pp.ScheduleZBVZeroBubble
    with pytest.raises(ValueError):
        get_schedule_class("2F2B")


# ---------------------------------------------------------------- backwards


class Checkpointed(nn.Module):
    def __init__(self, part: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


def _of_checkpoints(rank: int, name: str, parts: list[nn.Module], reentrant: bool) -> Trained:
    pipeline = Pipeline(name, rank, 2, parts, 4, wrap=lambda part: Checkpointed(part, reentrant))
    return pipeline.train([(x.requires_grad_(), y) for x, y in batches(2)])


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_stages_train_as_others_on_2_ranks(name: str, reentrant: bool):
    parts = dense(2 * SCHEDULES[name][1])
    found = run_ranks(2, _of_checkpoints, name, parts, reentrant)
    verify_same(found, one_process(parts, batches(2), 4))


def _of_frozen(rank: int, parts: list[nn.Module]) -> list[Any]:
    """The first stage's weights are frozen or not."""
    found: list[Any] = []
    for is_frozen in (False, True):
        mine = copy.deepcopy(parts[rank]).requires_grad_(rank == 1 or not is_frozen)
        stage = pp.PipelineStage(mine, rank, 2, CPU)
        schedule = pp.ScheduleGPipe(stage, 2, loss_fn=mse)
        x, y = batches(1)[0]
        schedule.step(*([x] if rank == 0 else []), target=y)
        found.append([p.grad for p in mine.parameters()])
    return found


def test_frozen_stages_get_no_gradient_on_2_ranks():
    first, last = run_ranks(2, _of_frozen, dense(2))
    assert not any(g is None for g in first[0])
    assert all(g is None for g in first[1])
    assert all(torch.equal(a, b) for a, b in zip(last[0], last[1], strict=True))


# ---------------------------------------------------------------- misfits


def _misfits(rank: int) -> None:
    parts = dense(2)
    x, y = batches(1)[0]
    stage = pp.PipelineStage(parts[rank], rank, 2, CPU)
    with pytest.raises(UsageError):
        pp.PipelineStage(parts[0], 2, 2, CPU)
    with pytest.raises(UsageError):
        pp.ScheduleZBVZeroBubble([stage], 4, loss_fn=mse)
    with pytest.raises(UsageError):
        pp.Schedule1F1B(pp.PipelineStage(parts[rank], 1 - rank, 2, CPU), 4, loss_fn=mse)
    schedule = pp.Schedule1F1B(stage, 12, loss_fn=mse)
    if rank == 0:
        with pytest.raises(ShapeError):
            schedule.step(x)  # 11 rows
    with pytest.raises(UsageError):
        schedule.step_microbatches([(x,)])
    schedule = pp.Schedule1F1B(stage, 4, loss_fn=mse)
    with torch.no_grad(), pytest.raises(ModuleError):
        schedule.step(x, target=y)
    dure.barrier()


def test_misfits_are_refused_on_2_ranks():
    run_ranks(2, _misfits)
    assert issubclass(ScheduleError, UsageError)
