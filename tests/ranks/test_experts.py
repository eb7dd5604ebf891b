"""Layers of experts: routing by hand, and experts on several ranks against one rank."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close as close
from torch.utils.checkpoint import checkpoint

import dure
from dure.checkpoint import load, save
from dure.errors import ModuleError, PlacementError, ShapeError, UsageError
from dure.fsdp import fully_shard, strategy
from dure.mesh import DeviceMesh, init_device_mesh
from dure.nn.experts import (
    GroupedExperts,
    MoE,
    MoEArgs,
    TokenChoiceTopKRouter,
    balancing_loss,
    tokens_per_expert,
    update_expert_bias,
)
from dure.tensor import DTensor, Shard
from dure.tensor.debug import CommDebugMode
from dure.tensor.parallel import (
    ExpertParallel,
    PrepareModuleInputOutput,
    SequenceParallel,
    parallelize_module,
)
from dure.testing import run_ranks
from ranks.fsdp_models import making

STEPS, D, H, WORDS = 3, 6, 4, 11
BALANCED: dict[str, Any] = {"aux_loss_coeff": 0.1, "z_loss_coeff": 0.01, "load_balance_coeff": 0.01}
ALL_TO_ALL, ALL_REDUCE = "c10d.alltoall_base_", "c10d.allreduce_"


def layer(seed: int = 0, **args: Any) -> MoE:
    chosen: dict[str, Any] = {"num_experts": 4, "top_k": 2} | args
    with making:  # thread-ranks share the generator
        torch.manual_seed(seed)
        return MoE(MoEArgs(**chosen), D, H).double()


def drawn(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- one rank ------------------------------------------------------------------------------------


@pytest.mark.parametrize("func", ["softmax", "sigmoid"])
def test_a_router_chooses_by_scores_and_a_bias_changes_only_the_choice(func: Any) -> None:
    def route(bias: list[float] | None, **more: Any) -> Any:
        router = TokenChoiceTopKRouter(3, MoEArgs(num_experts=3, score_func=func, top_k=2, **more))
        router.gate.weight.data = torch.eye(3)
        given = None if bias is None else torch.tensor(bias)
        return router(torch.tensor([[0.0, 1.0, 2.0]]), given)

    raw = [1 / (1 + math.exp(-v)) for v in range(3)]
    if func == "softmax":
        raw = [math.exp(v) / (1 + math.e + math.e**2) for v in range(3)]
    plain = route(None)
    assert plain.selected_experts.tolist() == [[2, 1]]
    assert plain.num_tokens_per_expert.tolist() == [0, 1, 1]
    close(plain.top_scores, torch.tensor([[raw[2], raw[1]]]))
    biased = route([5.0, 0.0, 0.0])
    assert biased.selected_experts.tolist() == [[0, 2]]
    close(biased.top_scores, torch.tensor([[raw[0], raw[2]]]))
    normed = route(None, route_norm=True, route_scale=3.0)
    sum_ = raw[2] + raw[1]
    close(normed.top_scores, torch.tensor([[3 * raw[2] / sum_, 3 * raw[1] / sum_]]))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("shared", [0, 2])
def test_a_token_is_the_sum_of_its_experts(before: bool, shared: int) -> None:
    moe = layer(num_shared_experts=shared, score_before_experts=before)
    x = drawn(2, 5, D).requires_grad_()
    got = moe(x)
    got.square().sum().backward()
    grads = [x.grad, *(p.grad for p in moe.parameters())]
    x.grad = None
    moe.zero_grad()

    rows = []
    for token in x.reshape(-1, D):
        scores = (moe.router.gate.weight @ token).sigmoid()
        row = torch.zeros(D, dtype=torch.float64)
        if moe.shared_experts is not None:
            row = moe.shared_experts(token)
        for e in scores.argsort(descending=True)[:2].tolist():
            w1, w2, w3 = (w[e] for w in (moe.experts.w1, moe.experts.w2, moe.experts.w3))
            into = token * scores[e] if before else token
            made = w2 @ (F.silu(w1 @ into) * (w3 @ into))
            row = row + (made if before else made * scores[e])
        rows.append(row)
    wanted = torch.stack(rows).reshape(x.shape)
    close(got, wanted)
    wanted.square().sum().backward()
    for mine, parameter in zip(grads, [x, *moe.parameters()], strict=True):
        close(mine, parameter.grad)


def test_a_capacity_keeps_the_highest_scores() -> None:
    """Four tokens want expert 0 of 2, whose capacity is 1.0 * 4 * 1 / 2: two stay."""
    moe = layer(num_experts=2, top_k=1, num_shared_experts=0, capacity_factor=1.0)
    with torch.no_grad():
        moe.router.gate.weight.zero_()[0, 0] = 1.0
    x = drawn(4, D)
    x[:, 0] = torch.tensor([1.0, 4.0, 2.0, 3.0])
    got = moe(x)
    whole = copy.deepcopy(moe)
    whole.args = MoEArgs(num_experts=2, top_k=1, num_shared_experts=0)
    wanted = whole(x)
    assert got[[0, 2]].tolist() == torch.zeros(2, D).tolist()
    close(got[[1, 3]], wanted[[1, 3]])
    assert tokens_per_expert(moe)[""].tolist() == [4, 0]  # what was wanted, not what was computed


def test_a_bias_moves_against_the_load_and_a_loss_is_one_where_the_load_is_even() -> None:
    moe = layer(top_k=1, aux_loss_coeff=2.0, load_balance_coeff=0.5)
    with torch.no_grad():
        moe.router.gate.weight.zero_()[:4, :4] = 50 * torch.eye(4)
    moe(torch.eye(D).double()[:4])
    close(balancing_loss(moe), torch.tensor(2.0, dtype=torch.float64), rtol=1e-2, atol=0)
    moe(torch.eye(D).double()[[0, 0, 0, 1]])
    # Fractions and mean scores are (3/4, 1/4, 0, 0), or nearly: 2 * 4 * (9/16 + 1/16).
    skewed = balancing_loss(moe)
    scores = torch.full((4, 4), 0.5, dtype=torch.float64)
    scores[[0, 1, 2, 3], [0, 0, 0, 1]] = 1.0
    mean = (scores / scores.sum(1, keepdim=True)).mean(0)
    close(skewed, 2 * 4 * (0.75 * mean[0] + 0.25 * mean[1]))
    moe.eval()(torch.eye(D).double()[:1])  # is not counted
    loads = update_expert_bias(moe)
    assert loads[""].tolist() == [4, 2, 1, 1]
    assert moe.expert_bias.tolist() == [-0.5, 0.0, 0.5, 0.5]
    assert tokens_per_expert(moe)[""].tolist() == [0] * 4


@pytest.mark.parametrize("before", [False, True])
def test_low_precision_and_autocast_compute_what_doubles_do(before: bool) -> None:
    moe, x = layer(score_before_experts=before), drawn(9, D)
    wanted = moe(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = moe.float()(x.float().requires_grad_())
        got.sum().backward()
    close(got.double(), wanted, rtol=0.05, atol=0.02)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in moe.parameters())
    low = moe.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert low.dtype == torch.bfloat16
    close(low.double(), wanted, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_tokens_count_once(reentrant: bool) -> None:
    moe, x = layer(**BALANCED), drawn(7, D).requires_grad_()
    out = checkpoint(moe, x, use_reentrant=reentrant)
    if reentrant:
        with pytest.raises(UsageError):
            balancing_loss(moe)
        out.sum().backward()
    else:
        (out.sum() + balancing_loss(moe)).backward()
        again = layer(**BALANCED)
        (again(x).sum() + balancing_loss(again)).backward()
        close(moe.router.gate.weight.grad, again.router.gate.weight.grad)
    assert tokens_per_expert(moe)[""].sum() == 7 * 2
    assert moe.balance is None


# ---- experts on several ranks --------------------------------------------------------------------


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


def trained(model: nn.Module, rank: int, ranks: int, everybody: DeviceMesh | None) -> Any:
    """Train on this rank's part of each batch; return losses, last gradients, weights, biases."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []
    loads: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        drawing = torch.Generator().manual_seed(step)
        batch = torch.randint(WORDS, (8, 5), generator=drawing).chunk(ranks)[rank]
        optimizer.zero_grad()
        scores = model(batch[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(scores, batch[:, 1:].flatten()) + balancing_loss(model, everybody)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        loads = update_expert_bias(model, everybody)
        loss = loss.detach()
        if everybody is not None:
            dure.all_reduce(loss, dure.ReduceOp.AVG)
        losses.append(loss.item())
    biases = [b for name, b in model.named_buffers() if "bias" in name]
    grads = {n: _whole(p.grad) for n, p in model.named_parameters()}
    return losses, grads, {n: _whole(p) for n, p in model.named_parameters()}, biases, loads


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


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
        everybody = mesh["dp", "ep"]._flatten("data")  # pyright: ignore[reportPrivateUsage]
        model = copy.deepcopy(made)
        parallelize_module(model, mesh["ep"], {"layers.*.moe.experts": ExpertParallel()})
        with strategy(way):
            for block in model.layers:
                fully_shard(block.moe.experts, mesh=mesh["dp"])
                fully_shard(block, mesh=everybody)
            fully_shard(model, mesh=everybody)
        return trained(model, rank, everybody.size(), everybody)

    for got in run_ranks(shape[0] * shape[1], body):
        close(got, wanted, rtol=0, atol=1e-10)


def test_a_step_communicates_what_is_documented_and_nothing_else() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = parallelize_module(layer(**BALANCED), mesh, {"experts": ExpertParallel()})
        x = drawn(3, D, seed=rank).requires_grad_()
        for _ in range(2):
            with CommDebugMode() as seen:
                out = model(x)
            assert seen.get_comm_counts() == {ALL_TO_ALL: 3}  # of counts; of rows, there and back
            with CommDebugMode() as seen:
                loss = out.sum() + balancing_loss(model, mesh)
            assert seen.get_comm_counts() == {ALL_REDUCE: 1}
            with CommDebugMode() as seen:
                loss.backward()
            assert seen.get_comm_counts() == {ALL_TO_ALL: 2}
            with CommDebugMode() as seen:
                update_expert_bias(model, mesh)
            assert seen.get_comm_counts() == {ALL_REDUCE: 1}

    run_ranks(2, body)


class Again(nn.Module):
    """Experts that are computed again in backward; their last operator is the way back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: torch.Tensor) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False)


@pytest.mark.parametrize("again", [False, True])
def test_ranks_and_experts_without_tokens_have_gradients_of_zero(again: bool) -> None:
    """Rank 1 has no tokens, and all of rank 0's want experts 0 and 1; 5 experts: 3 and 2."""
    alone = layer(num_experts=5)
    with torch.no_grad():
        alone.router.gate.weight.zero_()[:2] = 1.0
    x = drawn(3, D).abs()
    alone(x).sum().backward()
    assert tokens_per_expert(alone, reset=True)[""].tolist() == [3, 3, 0, 0, 0]

    def body(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        model = copy.deepcopy(alone)
        model.zero_grad()
        parallelize_module(model, mesh, {"experts": ExpertParallel(gradient_divisor=1)})
        experts = model.experts
        if again:
            model.experts = Again(experts)
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
        mesh = init_device_mesh("cpu", (2,))
        model = copy.deepcopy(alone)
        model.zero_grad()
        parallelize_module(model, mesh, {"experts": ExpertParallel()})
        out = model(batches[rank])
        close(out, outs[rank])
        out.square().mean().backward()
        for name, parameter in model.experts.named_parameters():
            close(parameter.grad.full_tensor(), alone.experts.get_parameter(name).grad)

    run_ranks(2, body)


@pytest.mark.parametrize("lengths", [(3, 3), (1, 5), (0, 6)])
def test_balancing_is_exact_over_ranks_with_any_numbers_of_tokens(lengths: Any) -> None:
    alone, x = layer(**BALANCED), drawn(6, D)
    alone(x)
    wanted = balancing_loss(alone)
    wanted.backward()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = copy.deepcopy(alone)
        model.zero_grad()
        parallelize_module(model, mesh, {"experts": ExpertParallel()})
        model(x.split(lengths)[rank])
        loss = balancing_loss(model, mesh)
        loss.backward()
        gradient = model.router.gate.weight.grad
        for mine, whole in ((loss.detach(), wanted), (gradient, alone.router.gate.weight.grad)):
            dure.all_reduce(mine, dure.ReduceOp.AVG)
            close(mine, whole.detach())

    run_ranks(2, body)


def test_experts_over_ranks_that_share_a_sequence() -> None:
    """The axis is a tensor-parallel one: each rank routes its part of the sequence, one loss."""
    part = PrepareModuleInputOutput(
        input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_input=True,
        output_layouts=Shard(1), desired_output_layouts=Shard(1), use_local_output=False,
    )  # fmt: skip
    whole = SequenceParallel(sequence_dim=0, use_local_output=True)
    plan = {
        "moe": part,
        "moe.router.gate": whole,
        "moe.shared_experts.w?": whole,
        "moe.experts": ExpertParallel(gradient_divisor=1),
    }
    alone, x = nn.Sequential(), drawn(2, 6, D)
    alone.add_module("moe", layer())
    alone(x).square().mean().backward()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = copy.deepcopy(alone)
        model.zero_grad()
        parallelize_module(model, mesh, plan)
        out: Any = model(x.chunk(2, 1)[rank])
        loss = out.square().mean()
        loss.backward()
        for name, parameter in model.named_parameters():
            close(parameter.grad.full_tensor(), alone.get_parameter(name).grad, msg=name)

    run_ranks(2, body)


class Written(nn.Module):
    """Experts as a program has them that was written for torchtitan's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(drawn(4, D, D))

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        w: Any = self.w.to_local() if isinstance(self.w, DTensor) else self.w
        parts = x.split(num_tokens_per_expert.tolist())
        return torch.cat([part @ w[e] for e, part in enumerate(parts)])


def test_experts_that_a_program_brings() -> None:
    x, counts = drawn(8, D), torch.tensor([1.0, 4.0, 0.0, 3.0])  # as torch.histc counts
    wanted = Written()(x, counts.int())

    def body(rank: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2,))
        made = parallelize_module(Written(), mesh, ExpertParallel())(x, counts)
        return made.clone()  # is there then

    for got in run_ranks(2, body):
        close(got, wanted)


def test_replicas_leave_experts_out() -> None:
    alone, x = layer(), drawn(2, 3, D)
    alone(x).square().mean().backward()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = copy.deepcopy(alone)
        model.zero_grad()
        parallelize_module(model, mesh, {"experts": ExpertParallel()})
        with pytest.raises(ModuleError) as raised:
            dure.DistributedDataParallel(model, mesh=mesh)
        divided = ("experts.w1", "experts.w2", "experts.w3")
        assert raised.value.parameters == divided
        dure.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, divided)
        dure.DistributedDataParallel(model, mesh=mesh)(x[rank]).square().mean().backward()
        for name, parameter in model.named_parameters():
            close(_whole(parameter.grad), alone.get_parameter(name).grad, msg=name)

    run_ranks(2, body)


def test_a_checkpoint_is_loaded_by_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Saved by experts over 2 of 4 ranks, 5 of them as 3 and 2; loaded by one rank and by 3."""
    alone = layer(num_experts=5)

    def sharded(model: MoE, shape: tuple[int, int]) -> MoE:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
        parallelize_module(model, mesh["ep"], {"experts": ExpertParallel()})
        return fully_shard(model.experts, mesh=mesh["dp"]) and model

    def write(rank: int) -> None:
        save(sharded(copy.deepcopy(alone), (2, 2)).state_dict(), checkpoint_id=tmp_path)

    def read(rank: int, shape: tuple[int, int]) -> None:
        model = sharded(layer(1, num_experts=5), shape)
        load(model.state_dict(), checkpoint_id=tmp_path)
        for name, parameter in model.named_parameters():
            close(_whole(parameter), alone.get_parameter(name).detach(), rtol=0, atol=0)

    run_ranks(4, write)
    for shape in ((1, 1), (1, 3)):
        run_ranks(math.prod(shape), read, shape)


def test_misfits_are_refused() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
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

    run_ranks(4, body)
    for wrong in ({"top_k": 9}, {"score_func": "relu"}):
        with pytest.raises(UsageError):
            MoEArgs(**wrong)  # pyright: ignore[reportArgumentType]
