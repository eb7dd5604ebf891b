"""Pipelines whose stages are replicated or sharded over another axis of a mesh, or cut by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure
import dure.pipelining as pp
from dure.errors import UsageError
from dure.fsdp import fully_shard, strategy
from dure.tensor import DTensor, Partial
from dure.testing import CommRecorder, run_ranks
from tests.parallel.pipeline.ranks.pipeline_models import CPU, Pipeline, batches, dense


def _gathers(rank: int, parts: list[nn.Module]) -> list[str]:
    """Return what a step calls."""
    mesh = dure.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def wrap(part: Any) -> nn.Module:
        fully_shard(part.linear, mesh=mesh["dp"])
        return fully_shard(part, mesh=mesh["dp"])

    with strategy("gathered"):
        group = mesh["pp"].get_group()
        pipeline = Pipeline("1f1b", rank // 2, 2, parts, 4, wrap=wrap, group=group)
    data = batches(2, rows=8)
    pipeline.step(*data[0])
    with CommRecorder() as seen:
        pipeline.step(*data[1])
    return sorted(seen.ops)


def test_sharded_stages_gather_and_reduce_once_per_step_on_4_ranks():
    for ops in run_ranks(4, _gathers, dense(2)):
        assert sum("gather" in op for op in ops) == 2, ops  # the linear layer, and the rest
        assert sum("reduce_scatter" in op for op in ops) == 2, ops


class _Terms(nn.Module):
    """Returns a sum of which each rank of the mesh holds one term."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight, self.mesh = nn.Parameter(torch.eye(6)), mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        term = (x @ self.weight) * (self.mesh.get_local_rank() + 1)
        return DTensor.from_local(term, self.mesh, [Partial()])


def test_a_pending_reduction_is_carried_out_before_a_border_on_4_ranks():
    x = torch.arange(48.0).view(8, 6)

    def run(rank: int) -> torch.Tensor | None:
        mesh = dure.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        part = nn.Identity() if rank >= 2 else _Terms(mesh["tp"])
        stage = pp.PipelineStage(part, rank // 2, 2, CPU, group=mesh["pp"].get_group())
        schedule = pp.Schedule1F1B(stage, 4, loss_fn=lambda y, _: y.sum())
        return schedule.step(x) if rank < 2 else schedule.step(target=x)

    for output in run_ranks(4, run)[2:]:
        assert output is not None and torch.equal(output, 3 * x)


def test_one_scaler_decides_for_all_stages():
    """Only the last stage has a loss to scale; where it is inf, no stage steps."""

    def run(rank: int) -> list[tuple[bool, float]]:
        torch.manual_seed(rank)
        stage, is_bad = nn.Linear(4, 4), [False]
        optimizer, scaler = torch.optim.SGD(stage.parameters(), 0.1), dure.GradScaler("cpu", 8.0)

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            found = (output - target).square().mean()
            return scaler.scale(found * float("inf") if is_bad[0] else found)

        made = pp.PipelineStage(stage, rank, 2, CPU)
        schedule = pp.Schedule1F1B(made, 2, loss_fn=loss)
        x = torch.ones(4, 4)
        found: list[tuple[bool, float]] = []
        for is_bad[0] in (False, True, False):
            before = stage.weight.detach().clone()
            schedule.step(*([x] if rank == 0 else []), target=x if rank == 1 else None)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append((not torch.equal(stage.weight, before), scaler.get_scale()))
        return found

    assert run_ranks(2, run) == [[(True, 8.0), (False, 4.0), (True, 4.0)]] * 2


def test_a_scaler_that_no_rank_used_is_refused():
    def run(rank: int) -> None:
        weight = nn.Parameter(torch.ones(2))
        weight.sum().backward()
        with pytest.raises(UsageError, match="no rank has scaled a loss"):
            dure.GradScaler("cpu").step(torch.optim.SGD([weight], 0.1))

    run_ranks(2, run)
