"""A compiled module with DTensor parameters computes what the module computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dure.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.down(torch.relu(self.up(x)))) * 2


def test_a_compiled_module_trains_as_it_is() -> None:
    torch.manual_seed(0)
    alone = Small()
    loss = alone(X).sum()
    loss.backward()
    counters.clear()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model: Any = copy.deepcopy(alone)
        model.zero_grad()
        for layer, where in ((model.up, Shard(0)), (model.down, Shard(1))):
            layer.weight = distribute_tensor(layer.weight, mesh, [where])
        model.up.bias = distribute_tensor(model.up.bias, mesh, [Shard(0)])
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            out: Any = compiled(distribute_tensor(X, mesh, [Replicate()]))
            torch.testing.assert_close(out.full_tensor(), alone(X))
            model.zero_grad()
            out.sum().backward()
            for own, other in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(own.grad.full_tensor(), other.grad)

    run_ranks(2, body)
    assert counters["stats"]["unique_graphs"] == 0  # nothing of DTensors was traced


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("foreach", [False, True])
def test_a_compiled_step_of_an_optimizer_is_the_step(foreach: bool) -> None:
    alone = nn.Parameter(X.clone())
    alone.grad = X.clone()
    expected = torch.optim.AdamW([alone], lr=0.1, foreach=foreach)

    def body(rank: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (1,))
        weight: Any = nn.Parameter(distribute_tensor(X.clone(), mesh, [Shard(0)]))
        weight.grad = distribute_tensor(X.clone(), mesh, [Shard(0)])
        optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=foreach)
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(3):
            step()
        return weight.full_tensor().detach()

    for _ in range(3):
        expected.step()
    (seen,) = run_ranks(1, body)
    torch.testing.assert_close(seen, alone.detach())
