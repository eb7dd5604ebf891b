"""Parameters that several stages of a pipeline have: one gradient, one value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
import dure.pipelining as pp
from dure.fsdp import fully_shard
from dure.mesh import init_device_mesh
from dure.tensor import DTensor, Replicate, Shard, distribute_tensor
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
    stages_of,
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
    return pipeline.train(batches(2))


@pytest.mark.parametrize(("name", "world"), [("1f1b", 3), ("zb-v", 2)])
def test_tied_ends_have_one_gradient(name: str, world: int):
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
def test_a_norm_of_all_stages_counts_tied_parameters_once(name: str, tied: bool):
    weight = nn.Parameter(torch.eye(6, dtype=torch.float64))
    middle = dense(2 * SCHEDULES[name][1] - 2)
    end = _Embedding(weight if tied else nn.Parameter(weight.detach() * 2), is_output=True)
    parts = [_Embedding(weight), *middle, end]
    found = run_ranks(2, _norms, name, parts, tied)
    model = nn.Sequential(*parts)
    gradients_alone(model, batches(1), 4)
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert found == [pytest.approx([expected.item()] * 2, rel=1e-9)] * 2


@pytest.mark.parametrize("change", ["moved", "replaced", "sharded"])
def test_tied_parameters_that_were_changed_after_a_step_have_one_gradient_2_ranks(
    change: str,
):
    weight = nn.Parameter(torch.eye(6, dtype=torch.float64))
    parts = [_Embedding(weight), _Embedding(weight, is_output=True)]

    def rank_main(rank: int) -> torch.Tensor:
        pairs = {0: {"table": "table"}, 1: {"table": "table"}}
        pipeline = Pipeline("1f1b", rank, 2, parts, 4, tied=pairs)
        part = pipeline.parts[rank]
        ((x, y),) = batches(1)
        pipeline.schedule.step(*([x] if rank == 0 else []), target=y)
        pipeline.optimizer.zero_grad()
        if change == "moved":
            part.float().double()
        elif change == "replaced":
            part.table = nn.Parameter(part.table.detach().clone())
        else:
            fully_shard(
                part, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
            )
        ((x, y),) = batches(1)
        pipeline.schedule.step(*([x] if rank == 0 else []), target=y)
        found = part.table.grad
        assert found is not None
        return found.full_tensor() if isinstance(found, DTensor) else found  # pyright: ignore

    expected = gradients_alone(nn.Sequential(*parts), batches(1), 4)["0.table"]
    for found in run_ranks(2, rank_main):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["gpipe", "zb-v"])
@pytest.mark.parametrize(
    ("embedding", "output"), [(True, True), (True, False), (False, True)], ids=str
)
def test_tied_ends_that_are_cut_over_the_vocabulary_have_one_gradient_4_ranks(
    name: str, embedding: bool, output: bool
):
    """The embedding's gradient comes replicated, the output layer's in parts."""
    weight = torch.arange(48.0, dtype=torch.float64).view(8, 6) / 48
    tokens = torch.tensor([[0, 3], [1, 7], [5, 5], [6, 2]])

    def rank_main(rank: int) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        index, last = rank // 2, 2 * SCHEDULES[name][1] - 1
        parts: dict[int, Any] = {i: nn.Identity() for i in stages_of(name, index, 2, 2)}
        if name == "gpipe":
            parts = {index: nn.Identity()}
        for i in parts:
            if i == 0:
                parts[i] = nn.Embedding(8, 6, _weight=weight.clone())
                style: Any = RowwiseParallel(input_layouts=Replicate())
            elif i == last:
                parts[i] = nn.Linear(6, 8, bias=False, dtype=torch.float64)
                style = ColwiseParallel(output_layouts=Replicate())
            if i in (0, last) and (output if i else embedding):
                parallelize_module(parts[i], mesh["tp"], style)
        stages = [
            pp.PipelineStage(
                part,
                i,
                last + 1,
                CPU,
                group=mesh["pp"].get_group(),
                tied={"table": "weight"} if i in (0, last) else None,
            )
            for i, part in parts.items()
        ]
        made: Any = SCHEDULES[name][0]
        schedule = made(
            stages if name != "gpipe" else stages[0], 2, loss_fn=lambda y, _: y.square().sum()
        )
        for _ in range(2):
            schedule.step(
                *([tokens] if 0 in parts else []), target=tokens if last in parts else None
            )
        found = [parts[i].weight.grad for i in parts if i in (0, last)]
        return [g.full_tensor() if isinstance(g, DTensor) else g for g in found]

    alone = nn.Parameter(weight.clone())
    (alone[tokens] @ alone.t()).square().sum().backward()  # twice the mean of two microbatches
    for found in [g for each in run_ranks(4, rank_main) for g in each]:
        torch.testing.assert_close(found, alone.grad)


class _Scaled(nn.Module):
    """Multiplies by the sum of this rank's part of the weight."""

    def __init__(self, weight: DTensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.to_local().sum()  # pyright: ignore[reportCallIssue]


def test_tied_ends_that_are_cut_over_different_axes_of_one_size_have_one_value_8_ranks():
    def rank_main(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        stage = mesh.get_local_rank("pp")
        values = torch.arange(4.0) + 10 * stage
        cut = distribute_tensor(values, mesh["tp" if stage else "dp"], [Shard(0)])
        part = _Scaled(cut)
        group, tied = mesh["pp"].get_group(), {"e": "weight"}
        made = pp.PipelineStage(part, stage, 2, CPU, group=group, tied=tied)
        schedule = pp.ScheduleGPipe(made, 2, loss_fn=lambda y, _: y.sum())
        x = torch.ones(4, 1)
        schedule.step(*([] if stage else [x]), target=x if stage else None)
        return part.weight.full_tensor().tolist()  # pyright: ignore[reportCallIssue]

    assert run_ranks(8, rank_main) == [[0.0, 1.0, 2.0, 3.0]] * 8
