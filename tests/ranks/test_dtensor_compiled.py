"""A compiled module with DTensor parameters computes what the module computes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from dure.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x)) * 2


def test_a_compiled_module_trains_as_it_is() -> None:
    torch.manual_seed(0)
    alone = Small()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,))
        model: Any = copy.deepcopy(alone)
        model.layer.weight = distribute_tensor(model.layer.weight, mesh, [Shard(0)])
        model.layer.bias = distribute_tensor(model.layer.bias, mesh, [Shard(0)])
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            batch = distribute_tensor(X, mesh, [Replicate()])
            out: Any = compiled(batch)
            torch.testing.assert_close(out.full_tensor(), alone(X))
            model.zero_grad()
            alone.zero_grad()
            out.sum().backward()
            alone(X).sum().backward()
            torch.testing.assert_close(
                model.layer.weight.grad.full_tensor(), alone.layer.weight.grad
            )

    run_ranks(1, body)
