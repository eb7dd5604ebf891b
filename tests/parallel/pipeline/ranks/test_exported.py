"""Stages that are cut out of a model by torch.export."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dure.pipelining as pp
from dure.errors import ModuleError
from dure.testing import run_ranks
from tests.parallel.pipeline.ranks.pipeline_models import CPU, assert_gradients, batches, mse


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
    torch.testing.assert_close(pipes[0](x[:3], **kwargs), (model(x[:3], **kwargs),))
    assert [name for name, _ in pipes[0].split_gm.named_children()] == ["submod_0", "submod_1"]
    assert pipes[0].split_gm.submod_1 is pipes[0].get_stage_module(1)
    for missing in (2, -1):
        with pytest.raises(ModuleError):
            pipes[0].get_stage_module(missing)
    found = run_ranks(2, _of_export, pipes, x, y)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (mse(model(a, scale=a[:, :1]), b) / 2).backward()
    expected: Any = {name: p.grad for name, p in model.named_parameters()}
    for gradients in found:
        assert_gradients(gradients, expected)


class _Named(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        more = x + 1
        pp.pipe_split()
        return {"more": more, "twice": 2 * x}


def test_a_pipe_returns_its_outputs_as_a_tuple_and_shows_its_stages(capsys):
    pipe = pp.pipeline(_Named(), (torch.ones(2),))
    assert [t.tolist() for t in pipe(torch.tensor([1.0, 3.0]))] == [[2.0, 4.0], [2.0, 6.0]]
    assert isinstance(pipe(torch.ones(2)), tuple)
    pipe.print_readable()
    shown = capsys.readouterr().out
    assert shown.count("def forward") == 3  # the pipe and its two stages
