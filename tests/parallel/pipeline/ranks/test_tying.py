"""Parameters that several stages of a pipeline have: one gradient, one value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
import dure.pipelining as pp
from dure.mesh import init_device_mesh
from dure.tensor import DTensor, Replicate
from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dure.testing import run_ranks
from tests.parallel.pipeline.ranks.pipeline_models import (
    CPU,
    SCHEDULES,
    Pipeline,
    Trained,
    assert_gradients,
    batches,
    dense,
    gradients_alone,
    one_process,
    verify_same,
)


class _Embedding(nn.Module):
    """Multiplies by its weight or, as the output layer, by the transposed one."""

    def __init__(self, weight: nn.Parameter, is_output: bool = False) -> None:
        super().__init__()
        self.table, self.is_output = weight, is_output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.table.t() if self.is_output else self.table)


def _of_tied(rank: int, name: str, world: int, parts: list[nn.Module]) -> Trained:
    last = len(parts) - 1
    tied = {i: {"table": "table"} for i in (0, last)}
    pipeline = Pipeline(name, rank, world, parts, 4, tied=tied)
    if pipeline.has_last and not pipeline.has_first:
        with torch.no_grad():
            pipeline.parts[last].get_parameter("table").zero_()  # the first stage's values count
    losses = []
    for x, y in batches(2):
        losses.append(pipeline.step(x, y))
        if pipeline.has_last and not pipeline.has_first:  # programs may replace parameters
            part: Any = pipeline.parts[last]
            part.table = nn.Parameter(part.table.detach().clone())
            pipeline.optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    return losses, pipeline.weights()


@pytest.mark.parametrize(("name", "world"), [("1f1b", 3), ("zb-v", 2)])
def test_tied_ends_have_one_gradient(name, world):
    weight = nn.Parameter(torch.eye(6, dtype=torch.float64))
    middle = dense(world * SCHEDULES[name][1] - 2)
    parts = [_Embedding(weight), *middle, _Embedding(weight, is_output=True)]
    found = run_ranks(world, _of_tied, name, world, parts)
    verify_same(found, one_process(parts, batches(2), 4))


def _accumulating(rank: int, parts: list[nn.Module]) -> dict[str, torch.Tensor]:
    pipeline = Pipeline("1f1b", rank, 2, parts, 4, tied={0: {"t": "shift"}, 1: {"t": "shift"}})
    for x, y in batches(2):
        pipeline.schedule.step(*([x] if rank == 0 else []), target=y)
    return pipeline.gradients()


def test_gradients_add_up_over_steps_that_are_not_zeroed_on_2_ranks():
    parts = dense(2)
    parts[1].shift = parts[0].shift
    first, second = run_ranks(2, _accumulating, parts)
    expected = gradients_alone(nn.Sequential(*parts), batches(2), 4)
    expected["1.shift"] = expected["0.shift"]
    assert_gradients(first | second, expected)


def _norms(rank: int, name: str, parts: list[nn.Module], tied: bool) -> list[float]:
    last = len(parts) - 1
    names = {i: {"table": "table"} for i in (0, last)} if tied else None
    pipeline = Pipeline(name, rank, 2, parts, 4, tied=names)
    ((x, y),) = batches(1)
    pipeline.schedule.step(*([x] if pipeline.has_first else []), target=y)
    twice = [p for part in pipeline.parts.values() for p in part.parameters()]
    group = dist.group.WORLD
    known, given = (dist.clip_grad_norm_(twice, 1e9, process_group=g) for g in (None, group))
    return [known.item(), given.item()]


@pytest.mark.parametrize(("name", "tied"), [("1f1b", True), ("1f1b", False), ("zb-v", True)])
def test_a_norm_of_all_stages_counts_tied_parameters_once(name, tied):
    weight = nn.Parameter(torch.eye(6, dtype=torch.float64))
    middle = dense(2 * SCHEDULES[name][1] - 2)
    end = _Embedding(weight if tied else nn.Parameter(weight.detach() * 2), is_output=True)
    parts = [_Embedding(weight), *middle, end]
    found = run_ranks(2, _norms, name, parts, tied)
    model = nn.Sequential(*parts)
    gradients_alone(model, batches(1), 4)
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert found == [pytest.approx([expected.item()] * 2, rel=1e-9)] * 2


@pytest.mark.parametrize(
    ("embedding", "output"), [(True, True), (True, False), (False, True)], ids=str
)
def test_tied_ends_that_are_cut_over_the_vocabulary_have_one_gradient_4_ranks(embedding, output):
    """The embedding's gradient comes replicated, the output layer's in parts."""
    weight = torch.arange(48.0, dtype=torch.float64).view(8, 6) / 48
    tokens = torch.tensor([[0, 3], [1, 7], [5, 5], [6, 2]])

    def rank_main(rank: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        is_last = rank >= 2
        part: Any = nn.Embedding(8, 6, _weight=weight.clone())
        style: Any = RowwiseParallel(input_layouts=Replicate())
        if is_last:
            part = nn.Linear(6, 8, bias=False, dtype=torch.float64)
            style = ColwiseParallel(output_layouts=Replicate())
        if output if is_last else embedding:
            parallelize_module(part, mesh["tp"], style)
        group, tied = mesh["pp"].get_group(), {"table": "weight"}
        stage = pp.PipelineStage(part, int(is_last), 2, CPU, group=group, tied=tied)
        schedule = pp.ScheduleGPipe(stage, 2, loss_fn=lambda y, _: y.square().sum())
        for _ in range(2):
            schedule.step(*([] if is_last else [tokens]), target=tokens if is_last else None)
        grad = part.weight.grad
        return grad.full_tensor() if isinstance(grad, DTensor) else grad

    alone = nn.Parameter(weight.clone())
    (alone[tokens] @ alone.t()).square().sum().backward()  # twice the mean of two microbatches
    for found in run_ranks(4, rank_main):
        torch.testing.assert_close(found, alone.grad)
