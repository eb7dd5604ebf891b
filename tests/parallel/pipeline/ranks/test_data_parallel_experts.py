"""Experts divided over one axis of a mesh, in stages over another: the weights of one rank."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import dure.pipelining as pp
from dure.fsdp import fully_shard
from dure.mesh import init_device_mesh
from dure.nn.experts import MoE, MoEArgs, update_expert_bias
from dure.tensor import DTensor, clip_grad_norm_
from dure.tensor.parallel import ExpertParallel, parallelize_module
from dure.testing import run_ranks

WIDTH, BLOCKS, ROWS, STEPS, MICROBATCHES = 8, 4, 16, 2, 2
ARGS = MoEArgs(num_experts=4, top_k=2, num_shared_experts=1, load_balance_coeff=1e-2)


class Block(nn.Module):
    """x + experts(norm(x))"""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), MoE(ARGS, WIDTH, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))


def blocks() -> list[Block]:
    torch.manual_seed(0)
    made = [Block().double() for _ in range(BLOCKS)]
    for block in made:
        for parameter in block.moe.parameters():
            nn.init.normal_(parameter, std=0.3)
    return made


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(2, ROWS, 3, WIDTH, dtype=torch.float64, generator=generator)
    return x[0], x[1]


def alone() -> dict[str, torch.Tensor]:
    net = nn.Sequential(*blocks())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for step in range(STEPS):
        x, target = data(step)
        nn.functional.mse_loss(net(x), target).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        update_expert_bias(net)
    return net.state_dict()


@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 2)])
def test_experts_in_stages_end_with_the_weights_of_one_rank(sizes: tuple[int, ...]) -> None:
    expected, model = alone(), blocks()

    def run(_: int) -> None:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "ep"))
        data_mesh = mesh["dp", "ep"]._flatten("data")
        rank, n = mesh.get_local_rank("pp"), sizes[0]
        part = range(rank * BLOCKS // n, (rank + 1) * BLOCKS // n)
        every = copy.deepcopy(model)
        names = {str(i): every[i] for i in part}
        stage = nn.Sequential()
        for name, block in names.items():
            stage.add_module(name, block)
        parallelize_module(stage, mesh["ep"], {"*.moe.experts": ExpertParallel()})
        for block in names.values():
            fully_shard(block.moe.experts, mesh=mesh["dp"])
            fully_shard(block, mesh=data_mesh)
        fully_shard(stage, mesh=data_mesh)
        optimizer = torch.optim.AdamW(stage.parameters(), 1e-2)
        made = pp.PipelineStage(stage, rank, n, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = pp.Schedule1F1B(made, MICROBATCHES, loss_fn=nn.MSELoss())
        mine, replicas = data_mesh.get_local_rank(), math.prod(sizes[1:])
        for step in range(STEPS):
            x, target = (t.chunk(replicas)[mine] for t in data(step))
            schedule.step(*([x] if rank == 0 else []), target=target if rank == n - 1 else None)
            parameters = list(stage.parameters())
            clip_grad_norm_(parameters, 0.5, process_group=mesh.get_group("pp"))
            optimizer.step()
            optimizer.zero_grad()
            update_expert_bias(stage, data_mesh)
        for name, value in stage.state_dict().items():
            found: Any = value.full_tensor() if isinstance(value, DTensor) else value
            torch.testing.assert_close(found, expected[name], rtol=1e-9, atol=1e-9)

    run_ranks(math.prod(sizes), run)
