"""Pipelines: what they compute is what one process computes, in every schedule."""

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
from dure.parallel.pipeline.messages import Messages
from dure.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from dure.pipelining.schedules import (
    _ComputationType,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from dure.testing import run_ranks
from ranks.pipeline_models import (
    CPU,
    SCHEDULES,
    Pipeline,
    batches,
    dense,
    mse,
    one_process,
    verify_same,
)

Told = tuple[list[list[float]], dict[str, torch.Tensor]]


def _train(
    rank: int, name: str, world: int, parts: list[nn.Module], num: int, **kwargs: Any
) -> Told:
    pipeline = Pipeline(name, rank, world, parts, num, **kwargs)
    losses = []
    for x, y in batches(3):
        before = pipeline.eval(x)  # between steps, and of other layouts
        losses.append(pipeline.step(x, y))
        assert before is None or not before.requires_grad
    return losses, pipeline.weights()


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_train_as_one_process(name: str):
    """Worlds of 1 to 4 ranks, unbuffered sends, microbatches of 3 and 2 rows."""
    each = SCHEDULES[name][1]
    for world in (1, 2, 3, 4):
        num = 8 if name == "dualpipe-v" else 4
        parts = dense(world * each)
        found = run_ranks(world, _train, name, world, parts, num, eager_bytes=0)
        verify_same(found, one_process(parts, batches(3), num))


def test_messages_over_gloo_and_deferred_receives_on_2_ranks():
    parts = dense(4)

    def train(rank: int) -> Told:
        return _train(rank, "interleaved", 2, parts, 4, defer_pp_recv=True)

    verify_same(run_ranks(2, train, backend="gloo"), one_process(parts, batches(3), 4))


# ---------------------------------------------------------------- what travels between stages


class Nested(nn.Module):
    """Hands on a nested structure, with None, a number, integers, another dtype and a skip."""

    def __init__(self, index: int, num: int) -> None:
        super().__init__()
        self.index, self.num = index, num
        self.linear = nn.Linear(6, 6).double()
        self.low = nn.Linear(6, 6)

    def forward(self, state: Any, nothing: None = None, skip: torch.Tensor | None = None) -> Any:
        x = state["x"] if isinstance(state, dict) else state
        if isinstance(state, dict):
            assert nothing is None and state["depth"] == self.index
            assert state["ids"].dtype == torch.int64 and not state["ids"].requires_grad
        first = x if skip is None else skip
        x = self.linear(x) + self.low(x.float()).double()
        if self.index == self.num - 1:
            return x + first
        ids = torch.arange(len(x))
        return {"x": x, "depth": self.index + 1, "ids": ids}, None, first * 1


def of_nested(rank: int, name: str, world: int, parts: list[nn.Module]) -> Told:
    pipeline = Pipeline(name, rank, world, parts, 4)
    return [pipeline.step(x, y) for x, y in batches(3)], pipeline.weights()


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_structures_dtypes_and_skips_travel_on_2_ranks(name: str):
    num = 2 * SCHEDULES[name][1]
    torch.manual_seed(1)
    parts = [Nested(i, num) for i in range(num)]
    found = run_ranks(2, of_nested, name, 2, parts, eager_bytes=0)
    expected = one_process([_Single(part) for part in parts], batches(3), 4)
    renamed = {name.replace(".part.", "."): value for name, value in expected[1].items()}
    verify_same(found, (expected[0], renamed))


class _Single(nn.Module):
    """Passes on what a stage returns as the next one's arguments."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any) -> Any:
        return self.part(*args)


STEADY, OTHER = [4, 4, 4], [2, 5, 3]
LENGTHS = [STEADY, STEADY, OTHER, OTHER, OTHER, STEADY, [1, 0, 7], STEADY]


def of_lengths(rank: int, parts: list[nn.Module], steps: list[list[int]]) -> list[list[float]]:
    pipeline = Pipeline("1f1b", rank, 2, parts, 3)
    told = []
    for lengths in steps:
        generator = torch.Generator().manual_seed(sum(lengths))
        data = [torch.randn(n, 6, generator=generator).double() for n in lengths]
        losses: list[torch.Tensor] = []
        outputs = pipeline.schedule.step_microbatches(
            [(x,) for x in data] if rank == 0 else None,
            None,
            [x.sin() for x in data] if rank == 1 else None,
            losses,
        )
        if rank == 1:
            assert outputs is not None and [len(x) for x in outputs] == lengths
        told.append([loss.item() for loss in losses])
    return told


def test_shapes_may_change_from_microbatch_to_microbatch_on_2_ranks():
    parts = dense(2)
    _, told = run_ranks(2, of_lengths, parts, LENGTHS, eager_bytes=0)
    for lengths, losses in zip(LENGTHS, told, strict=True):
        generator = torch.Generator().manual_seed(sum(lengths))
        data = [torch.randn(n, 6, generator=generator).double() for n in lengths]
        expected = [mse(nn.Sequential(*parts)(x), x.sin()).item() for x in data]
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12, equal_nan=True)


def test_where_shapes_change_all_the_time_nothing_is_sent_for_receives_posted_in_vain(
    monkeypatch: pytest.MonkeyPatch,
):
    """Where they are steady, receives are posted before anything comes; either way two messages."""
    sent: list[tuple[int, ...]] = []
    posted: list[int] = []
    send, post = Messages._send, Messages.post

    def counted(self: Any, tensor: torch.Tensor, *args: Any) -> None:
        sent.append(tuple(tensor.shape))
        send(self, tensor, *args)

    def watched(self: Any, transfer: Any) -> None:
        post(self, transfer)
        posted.append(len(self._posted[transfer].works))

    monkeypatch.setattr(Messages, "_send", counted)
    monkeypatch.setattr(Messages, "post", watched)
    parts = dense(2)
    for steps, expected in (([STEADY] * 4, 1), ([STEADY, OTHER] * 2, 0)):
        run_ranks(2, of_lengths, parts, steps[:2])
        before = len(sent)
        sent.clear()
        posted.clear()
        run_ranks(2, of_lengths, parts, steps)
        assert len(sent) - before == 2 * 2 * 2 * 3  # a header and a tensor; directions; steps; 3
        assert posted[-12:] == [expected] * 12
        sent.clear()


def _of_unused(rank: int, parts: list[nn.Module]) -> list[Any]:
    """The last stage uses one of two outputs; the first stage's weights are frozen or not."""
    told: list[Any] = []
    for is_frozen in (False, True):
        mine = copy.deepcopy(parts[rank]).requires_grad_(rank == 1 or not is_frozen)
        stage = pp.PipelineStage(mine, rank, 2, CPU)
        schedule = pp.ScheduleGPipe(stage, 2, loss_fn=mse)
        x, y = batches(1)[0]
        schedule.step(*([x] if rank == 0 else []), target=y)
        told.append([None if p.grad is None else p.grad for p in mine.parameters()])
    return told


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.unused(x)


class _First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_unused_outputs_and_frozen_stages_get_no_gradient_on_2_ranks():
    first, last = run_ranks(2, _of_unused, [_Two(), _First()])
    assert [g is None for g in first[0]] == [False, False, True, True]
    assert [g is None for g in first[1]] == [True] * 4
    assert not any(g is None for g in last[1])
    assert all(torch.equal(a, b) for a, b in zip(last[0], last[1], strict=True))


# ---------------------------------------------------------------- what a stage may be


class Checkpointed(nn.Module):
    def __init__(self, part: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


def _of_checkpoints(rank: int, name: str, parts: list[nn.Module], reentrant: bool) -> Told:
    pipeline = Pipeline(name, rank, 2, parts, 4, wrap=lambda part: Checkpointed(part, reentrant))
    losses = [pipeline.step(x.requires_grad_(), y) for x, y in batches(2)]
    weights = {name.replace(".part.", "."): w for name, w in pipeline.weights().items()}
    return losses, weights


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_checkpointed_stages_train_as_others_on_2_ranks(name: str):
    parts = dense(2 * SCHEDULES[name][1])
    expected = one_process(parts, batches(2), 4)
    for reentrant in (False, True):
        verify_same(run_ranks(2, _of_checkpoints, name, parts, reentrant), expected)


class _Embedding(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.table = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table


class _Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.out = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.out.t()


def _of_tied(rank: int, name: str, world: int, parts: list[nn.Module]) -> Told:
    last = len(parts) - 1
    pipeline = Pipeline(
        name, rank, world, parts, 4, tied={0: {"table": "table"}, last: {"table": "out"}}
    )
    if pipeline.has_last and not pipeline.has_first:
        with torch.no_grad():
            pipeline.parts[last].get_parameter("out").zero_()  # the first stage's values count
    return [pipeline.step(x, y) for x, y in batches(3)], pipeline.weights()


@pytest.mark.parametrize(("name", "world"), [("1f1b", 3), ("zb-v", 2)])
def test_tied_ends_have_one_gradient(name: str, world: int):
    weight = nn.Parameter(torch.eye(6, dtype=torch.float64))
    middle = dense(world * SCHEDULES[name][1] - 2)
    parts = [_Embedding(weight), *middle, _Head(weight)]
    found = run_ranks(world, _of_tied, name, world, parts)
    verify_same(found, one_process(parts, batches(3), 4))


def _accumulating(rank: int, parts: list[nn.Module]) -> dict[str, torch.Tensor]:
    pipeline = Pipeline("1f1b", rank, 2, parts, 4, tied={0: {"t": "shift"}, 1: {"t": "shift"}})
    for x, y in batches(2):
        pipeline.schedule.step(*([x] if rank == 0 else []), target=y)
    return {
        f"{i}.{name}": p.grad
        for i, part in pipeline.parts.items()
        for name, p in part.named_parameters()
        if p.grad is not None
    }


def test_gradients_add_up_over_steps_that_are_not_zeroed_on_2_ranks():
    parts = dense(2)
    parts[1].shift = parts[0].shift
    found = run_ranks(2, _accumulating, parts)
    net = nn.Sequential(*parts)
    for x, y in batches(2):
        for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            (mse(net(a), b) / 4).backward()
    for name, gradient in {**found[0], **found[1]}.items():
        expected = net.get_parameter(name).grad
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


class _Whole(nn.Module):
    """A model with a skip, an argument for a later stage, and tied ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 6))
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in "abc")

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        first = self.a(x @ self.table)
        pp.pipe_split()
        return (self.c(self.b(first).tanh()) + first * scale) @ self.table.t()


def _of_export(rank: int, pipes: list[Any], x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    stage = pipes[rank].build_stage(rank, CPU)
    schedule = pp.ScheduleGPipe(stage, 2, loss_fn=mse)
    if rank == 0:
        schedule.step(x, scale=x[:, :1])
    else:
        schedule.step(target=y)
    return {name: p.grad for name, p in stage.submod.named_parameters()}


def test_exported_models_train_in_stages_on_2_ranks():
    torch.manual_seed(2)
    model = _Whole().double()
    x, y = batches(1, rows=6)[0]
    kwargs = {"scale": x[:3, :1]}
    pipes = [pp.pipeline(copy.deepcopy(model), (x[:3],), kwargs) for _ in range(2)]
    assert pp.pipeline(model, (x[:3],), kwargs, {"c": pp.SplitPoint.BEGINNING}).num_stages == 3
    with pytest.raises(ModuleError):
        pp.pipeline(model, (x[:3],), kwargs, {"nowhere": pp.SplitPoint.END})
    assert pipes[0].num_stages == 2
    assert "table" in dict(pipes[0].get_stage_module(1).named_parameters())
    torch.testing.assert_close(pipes[0](x[:3], **kwargs), model(x[:3], **kwargs))
    found = run_ranks(2, _of_export, pipes, x, y)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (mse(model(a, scale=a[:, :1]), b) / 2).backward()
    for gradients in found:
        for name, gradient in gradients.items():
            expected = model.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- what one may ask for


def _of_losses(rank: int, parts: list[nn.Module]) -> tuple[list[float], list[float]]:
    options = pp.PipelineOptions(losses_everywhere=True)
    pipeline = Pipeline("interleaved", rank, 2, parts, 4, options=options)
    x, y = batches(1)[0]
    trained = pipeline.step(x, y)
    losses: list[torch.Tensor] = []
    pipeline.schedule.eval(*([x] if rank == 0 else []), target=y, losses=losses)
    return trained, [loss.item() for loss in losses]


def test_losses_are_known_on_all_ranks_where_asked_for_on_2_ranks():
    (trained, evaluated), other = run_ranks(2, _of_losses, dense(4))
    assert len(trained) == len(evaluated) == 4
    assert other == (trained, evaluated) and trained != evaluated


def _with_own_actions(rank: int, parts: list[nn.Module]) -> Told:
    pipeline = Pipeline("dualpipe-v", rank, 2, parts, 8)
    seen: list[str] = []

    def both(action: Any, context: Any) -> None:
        for part in action.sub_actions:
            seen.append(str(part))
            context.run(part)

    kind = _ComputationType.OVERLAP_F_B
    pipeline.schedule.register_custom_function(kind, both)
    told = [pipeline.step(*batches(1, rows=16)[0])]
    assert seen and {text[1] for text in seen} <= set("FBIW")
    with pytest.raises(UsageError):
        pipeline.schedule.register_custom_function(_ComputationType.SEND_F, both)
    return told, pipeline.weights()


def test_registered_functions_take_the_place_of_actions_on_2_ranks():
    parts = dense(4)
    found = run_ranks(2, _with_own_actions, parts)
    verify_same(found, one_process(parts, batches(1, rows=16), 8))


class _Deferred(nn.Module):
    """Computes its weight's gradient when it is told to."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.num_called = part, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)

    def later(self) -> Any:
        def run() -> None:
            self.num_called += 1

        return run


def _with_dw_builder(rank: int, parts: list[nn.Module]) -> int:
    part = _Deferred(copy.deepcopy(parts[rank]))
    stage = pp.PipelineStage(part, rank, 2, CPU, dw_builder=part.later)
    schedule = pp.ScheduleInterleavedZeroBubble([stage], 4, loss_fn=mse)
    x, y = batches(1)[0]
    schedule.step(*([x] if rank == 0 else []), target=y)
    return part.num_called


def test_dw_builder_is_called_once_a_microbatch_on_2_ranks():
    assert run_ranks(2, _with_dw_builder, dense(2)) == [4, 4]


def _with_file(rank: int, parts: list[nn.Module], folder: Any) -> Told:
    made: Any = Pipeline("zero-bubble", rank, 2, parts, 4)
    told = []
    for kind in ("compute_only", "compute_comms"):
        file = str(folder / f"{kind}{rank}.csv")
        made.schedule._dump_csv(file, format=kind)
        read: Any = _PipelineScheduleRuntime(made.stages, 4, loss_fn=mse)
        read._load_csv(file, format=kind)
        assert read.pipeline_order_with_comms == made.schedule.pipeline_order_with_comms
        made.schedule = read
        told.append(made.step(*batches(1)[0]))
    return told, made.weights()


def test_schedules_are_written_and_read_on_2_ranks(tmp_path: Any):
    parts = dense(4)
    found = run_ranks(2, _with_file, parts, tmp_path)
    verify_same(found, one_process(parts, batches(1) * 2, 4))


# ---------------------------------------------------------------- what does not fit


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


def test_what_does_not_fit_is_refused_on_2_ranks():
    run_ranks(2, _misfits)
    assert issubclass(ScheduleError, UsageError)


def test_schedule_classes_are_found_by_name():
    assert get_schedule_class("1f1b") is pp.Schedule1F1B
    assert get_schedule_class("zbvzerobubble") is pp.ScheduleZBVZeroBubble
    with pytest.raises(ValueError):
        get_schedule_class("2F2B")


def test_chunks_of_arguments_and_results():
    x = torch.arange(10).view(5, 2)
    args, kwargs = split_args_kwargs_into_chunks(
        (x, [x, "s"]), {"k": x}, 2, None, {"k": TensorChunkSpec(1)}
    )
    assert [a[0].tolist() for a in args] == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]]]
    assert args[1][1][1] == "s"
    assert [k["k"].tolist() for k in kwargs] == [
        [[0], [2], [4], [6], [8]],
        [[1], [3], [5], [7], [9]],
    ]
    merged = merge_chunks([{"a": a[0], "b": 1, "c": torch.tensor(2.0)} for a in args], None)
    assert torch.equal(merged["a"], x) and merged["b"] == 1
    assert merged["c"].tolist() == [2.0, 2.0]
    with pytest.raises(ShapeError):
        split_args_kwargs_into_chunks((x,), None, 6)
    with pytest.raises(UsageError):
        merge_chunks([{"a": 1}, {"a": 2}], None)
