"""Experts on several ranks against one rank."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close as close
from torch.utils.checkpoint import checkpoint

import dure
from dure.errors import PlacementError, ShapeError, UsageError
from dure.fsdp import fully_shard, strategy
from dure.mesh import DeviceMesh, init_device_mesh
from dure.nn.experts import (
    GroupedExperts,
    MoE,
    MoEArgs,
    balancing_loss,
    tokens_per_expert,
    update_expert_bias,
)
from dure.tensor.debug import CommDebugMode
from dure.tensor.parallel import (
    ExpertParallel,
    parallelize_module,
)
from dure.testing import run_ranks
from tests.nn.expert_models import BALANCED, D, H, drawn, layer
from tests.parallel.fsdp.ranks.fsdp_models import full_gradients, full_weights, making
from tests.thread_ranks import on_mesh, on_ranks

STEPS, WORDS = 3, 11
COUNTS, ALL_REDUCE = "c10d.alltoall_base_", "c10d.allreduce_"
ROWS = "c10d_functional.all_to_all_single"


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.how = nn.LayerNorm(D), how
        self.moe = MoE(MoEArgs(num_experts=4, top_k=2, **BALANCED), D, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "checkpoint":
            return x + checkpoint(self._made, x, use_reentrant=False)
        return x + self._made(x)

    def _made(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.norm(x))


class Net(nn.Module):
    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, D), nn.Linear(D, WORDS)
        self.layers = nn.ModuleList(Block(how) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for each in self.layers:
            x = each(x)
        return self.head(x)


def net(how: str = "plain") -> Net:
    with making:
        torch.manual_seed(1)
        return Net(how).double()


def trained(model: nn.Module, rank: int, ranks: int, data_mesh: DeviceMesh | None) -> Any:
    """Train on this rank's part of each batch; return losses, last gradients, weights, biases."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []
    loads: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        drawing = torch.Generator().manual_seed(step)
        batch = torch.randint(WORDS, (8, 5), generator=drawing).chunk(ranks)[rank]
        optimizer.zero_grad()
        scores = model(batch[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(scores, batch[:, 1:].flatten()) + balancing_loss(model, data_mesh)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        loads = update_expert_bias(model, data_mesh)
        loss = loss.detach()
        if data_mesh is not None:
            dure.all_reduce(loss, dure.ReduceOp.AVG)
        losses.append(loss.item())
    biases = [b for name, b in model.named_buffers() if "bias" in name]
    return losses, full_gradients(model), full_weights(model), biases, loads


CASES = [
    ((1, 1), "plain", "shared"),
    ((1, 2), "checkpoint", "gathered"),
    ((2, 1), "plain", "shared"),
    ((1, 4), "plain", "shared"),
    ((2, 2), "checkpoint", "shared"),
]


@pytest.mark.parametrize(("shape", "how", "way"), CASES)
def test_experts_and_shards_train_as_on_one_rank(shape: Any, how: str, way: str) -> None:
    """Experts over "ep", their parts over "dp"; all else over both. Clipped by one norm of all."""
    made, wanted = net(how), trained(net(), 0, 1, None)

    def body(rank: int) -> Any:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
        data_mesh = mesh["dp", "ep"]._flatten("data")  # pyright: ignore[reportPrivateUsage]
        model = copy.deepcopy(made)
        parallelize_module(model, mesh["ep"], {"layers.*.moe.experts": ExpertParallel()})
        with strategy(way):
            block: Any
            for block in model.layers:
                fully_shard(block.moe.experts, mesh=mesh["dp"])
                fully_shard(block, mesh=data_mesh)
            fully_shard(model, mesh=data_mesh)
        return trained(model, rank, data_mesh.size(), data_mesh)

    for got in run_ranks(shape[0] * shape[1], body):
        close(got, wanted, rtol=0, atol=1e-10)


def on_two_ranks(alone: MoE, **options: Any) -> tuple[DeviceMesh, MoE]:
    """Return a copy whose experts are divided over two ranks."""
    mesh, model = init_device_mesh("cpu", (2,)), copy.deepcopy(alone)
    model.zero_grad()
    parallelize_module(model, mesh, {"experts": ExpertParallel(**options)})
    return mesh, model


def assert_gradients(model: nn.Module, alone: nn.Module) -> None:
    for name, gradient in full_gradients(model).items():
        close(gradient, alone.get_parameter(name).grad, msg=name)


@on_ranks(2)
def test_a_step_communicates_what_is_documented_and_nothing_else(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(layer(**BALANCED), mesh, {"experts": ExpertParallel()})
    x = drawn(3, D, seed=rank).requires_grad_()
    for _ in range(2):
        with CommDebugMode() as seen:
            out = model(x)
        assert seen.get_comm_counts() == {COUNTS: 1, ROWS: 2}  # there and back
        with CommDebugMode() as seen:
            loss = out.sum() + balancing_loss(model, mesh)
        assert seen.get_comm_counts() == {ALL_REDUCE: 1}
        with CommDebugMode() as seen:
            loss.backward()
        assert seen.get_comm_counts() == {ROWS: 2}
        with CommDebugMode() as seen:
            update_expert_bias(model, mesh)
        assert seen.get_comm_counts() == {ALL_REDUCE: 1}


def test_ranks_and_experts_without_tokens_have_gradients_of_zero() -> None:
    """Rank 1 has no tokens, and all of rank 0's want experts 0 and 1; 5 experts: 3 and 2."""
    alone = layer(num_experts=5)
    with torch.no_grad():
        alone.router.gate.weight.zero_()[:2] = 1.0
    x = drawn(3, D).abs()
    alone(x).sum().backward()
    assert tokens_per_expert(alone, reset=True)[""].tolist() == [3, 3, 0, 0, 0]

    def body(rank: int) -> Any:
        mesh, model = on_two_ranks(alone, gradient_divisor=1)
        experts = model.experts
        mine = (x if rank == 0 else x[:0]).clone().requires_grad_()
        model(mine).sum().backward()
        assert mine.grad.shape == mine.shape
        gradients = {name: p.grad.full_tensor() for name, p in experts.named_parameters()}
        return gradients, tokens_per_expert(model, mesh)

    for gradients, loads in run_ranks(2, body):
        for name, parameter in alone.experts.named_parameters():
            close(gradients[name], parameter.grad)
            assert gradients[name][2:].count_nonzero() == 0
        assert loads[""].tolist() == [3, 3, 0, 0, 0]


def test_a_capacity_is_of_each_ranks_own_tokens() -> None:
    """Two ranks drop what one rank drops of two microbatches, also where those differ in length."""
    alone = layer(capacity_factor=0.75, num_shared_experts=0)
    batches = [drawn(12, D, seed=1), drawn(5, D, seed=2)]
    outs = [alone(x) for x in batches]
    (sum(out.square().mean() for out in outs) / 2).backward()
    assert any((out == 0).all(1).any() for out in outs), "nothing was dropped"

    def body(rank: int) -> None:
        _, model = on_two_ranks(alone)
        out = model(batches[rank])
        close(out, outs[rank])
        out.square().mean().backward()
        assert_gradients(model.experts, alone.experts)

    run_ranks(2, body)


@pytest.mark.parametrize("lengths", [(3, 3), (1, 5), (0, 6)])
def test_balancing_is_exact_over_ranks_with_any_numbers_of_tokens(lengths: Any) -> None:
    alone, x = layer(**BALANCED), drawn(6, D)
    alone(x)
    wanted = balancing_loss(alone)
    wanted.backward()

    def body(rank: int) -> None:
        mesh, model = on_two_ranks(alone)
        model(x.split(lengths)[rank])
        loss = balancing_loss(model, mesh)
        loss.backward()
        gradient = model.router.gate.weight.grad
        for mine, full in ((loss.detach(), wanted), (gradient, alone.router.gate.weight.grad)):
            assert mine is not None
            dure.all_reduce(mine, dure.ReduceOp.AVG)
            close(mine, full.detach())

    run_ranks(2, body)


@on_mesh(4)
def test_misfits_are_refused(mesh: DeviceMesh) -> None:
    style = ExpertParallel()
    with pytest.raises(PlacementError, match="1, 2, 3, 5"):  # 5 on 4 ranks: 2, 2, 1, none
        parallelize_module(GroupedExperts(D, H, 5), mesh, style)
    for wrong in (nn.ReLU(), nn.Bilinear(2, 2, 3), layer()):
        with pytest.raises(UsageError):
            parallelize_module(wrong, mesh, style)
    experts = parallelize_module(GroupedExperts(D, H, 4), mesh, style)
    with pytest.raises(UsageError):
        parallelize_module(experts, mesh, style)
    with pytest.raises(UsageError):
        experts(torch.ones(4, D))
    for counts in ([1, 1, 1], [1, 1, 1, 2]):
        with pytest.raises(ShapeError):
            experts(torch.ones(4, D), torch.tensor(counts))
