"""Pipelines whose stages are replicated or sharded over another axis of a mesh, or cut by it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import dure
import dure.pipelining as pp
from dure.errors import UsageError
from dure.fsdp import fully_shard, strategy
from dure.mesh import init_device_mesh
from dure.nn.experts import MoE, MoEArgs, update_expert_bias
from dure.tensor import DTensor, Partial, Replicate, clip_grad_norm_
from dure.tensor.parallel import (
    ColwiseParallel,
    ExpertParallel,
    RowwiseParallel,
    parallelize_module,
)
from dure.testing import CommRecorder, run_ranks
from tests.parallel.pipeline.ranks.pipeline_models import (
    CPU,
    SCHEDULES,
    Pipeline,
    assert_gradients,
    batches,
    dense,
    gradients_alone,
    interleaved,
    mse,
    one_process,
)

Weights = dict[str, torch.Tensor]


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _train(
    rank: int, name: str, kind: str, parts: list[nn.Module], is_moved: bool = False
) -> Weights:
    """At both places of the pipeline 2 ranks: replicas, each with half a batch, or parts."""
    mesh = dure.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "other"))
    other = mesh["other"]

    def wrap(part: Any) -> nn.Module:
        if kind == "ddp":
            return dure.DistributedDataParallel(part, process_group=other.get_group())
        if kind == "tensor":
            style = ColwiseParallel(output_layouts=Replicate())
            return parallelize_module(part, other, {"linear": style})
        fully_shard(part.linear, mesh=other)
        return fully_shard(part, mesh=other)

    way = "gathered" if kind == "gathered" else "shared"
    with strategy(way):
        group = mesh["pp"].get_group()
        pipeline = Pipeline(name, rank // 2, 2, parts, 4, wrap=wrap, group=group)
    for x, y in batches(2, rows=16):
        mine = [x, y] if kind == "tensor" else [t.chunk(2)[rank % 2] for t in (x, y)]
        pipeline.step(*mine)
        for part in pipeline.parts.values() if is_moved else ():
            part._apply(lambda t: t.clone())
        evaluated = pipeline.eval(x)
        assert (evaluated is not None) == pipeline.has_last
    weights = pipeline.weights().items()
    return {name.replace(".module.", "."): _whole(value) for name, value in weights}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("1f1b", "ddp"), ("1f1b", "gathered"), ("zero-bubble", "gathered"), ("zero-bubble", "tensor"),
     ("zb-v", "ddp"), ("zb-v", "gathered"), ("zb-v", "tensor")],
)  # fmt: skip
def test_stages_parallel_on_another_axis_train_as_one_process_on_4_ranks(name: str, kind: str):
    parts = dense(2 * SCHEDULES[name][1])
    found = run_ranks(4, _train, name, kind, parts)
    steps = batches(2, rows=16)
    _, expected = one_process(parts, steps if kind == "tensor" else interleaved(steps), 4)
    for weights in found:
        assert_gradients(weights, expected)


@pytest.mark.parametrize("kind", ["ddp", "gathered", "shared", "tensor"])
def test_stages_that_are_moved_between_steps_train_as_one_process_on_4_ranks(kind: str):
    parts = dense(2)
    found = run_ranks(4, _train, "1f1b", kind, parts, True)
    steps = batches(2, rows=16)
    _, expected = one_process(parts, steps if kind == "tensor" else interleaved(steps), 4)
    for weights in found:
        assert_gradients(weights, expected)


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


def _border(rank: int, parts: list[Any], is_told: bool) -> Weights:
    """A layer cut by columns, and one by rows behind the border, which gets a DTensor or a part."""
    mesh = dure.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    tp, index = mesh["tp"], rank // 2
    style: Any = [ColwiseParallel(use_local_output=False), RowwiseParallel()][index]
    part = parallelize_module(copy.deepcopy(parts[index]), tp, {"0": style})
    kinds: list[type] = []
    part.register_forward_pre_hook(lambda _, args: kinds.append(type(args[0])))

    def mesh_of(names: tuple[str, ...], _: None) -> Any:
        assert names == ("tp",)
        return tp

    stage = pp.PipelineStage(
        part, index, 2, CPU, group=mesh["pp"].get_group(), get_mesh=mesh_of if is_told else None
    )
    schedule = pp.Schedule1F1B(stage, 4, loss_fn=mse)
    x, y = batches(1)[0]
    schedule.step(*([x] if index == 0 else []), target=y)
    if index == 1:
        assert set(kinds) == {DTensor if is_told else torch.Tensor}
    named: list[tuple[str, Any]] = list(part.named_parameters())
    return {f"{index}.{n}": _whole(p.grad) for n, p in named if p.grad is not None}


@pytest.mark.parametrize("is_told", [False, True])
def test_tensors_of_a_mesh_cross_a_border_as_parts_or_dtensors_on_4_ranks(is_told: bool):
    torch.manual_seed(3)
    parts = [nn.Sequential(nn.Linear(6, 6).double()) for _ in range(2)]
    found = run_ranks(4, _border, parts, is_told)
    expected = gradients_alone(nn.Sequential(*parts), batches(1), 4)
    for gradients in found:
        assert len(gradients) == 2
        assert_gradients(gradients, expected)


class _Terms(nn.Module):
    """Returns a sum of which each rank of the mesh holds one term, and the batch itself."""

    def __init__(self, mesh: Any, op: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6, dtype=torch.float64))
        self.mesh, self.op = mesh, op

    def forward(self, x: torch.Tensor) -> Any:
        term = (x @ self.weight) * (self.mesh.get_local_rank() + 1)
        return {"sum": DTensor.from_local(term, self.mesh, [Partial(self.op)])}


class _TakesSum(nn.Module):
    def forward(self, found: dict[str, Any]) -> torch.Tensor:
        value = found["sum"]
        is_told = isinstance(value, DTensor)
        return value.to_local(grad_placements=[Replicate()]) if is_told else value


@pytest.mark.parametrize(("op", "factor"), [("sum", 3.0), ("avg", 1.5)])
@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_pending_reduction_is_carried_out_before_a_border_on_4_ranks(
    name: str, is_told: bool, op: str, factor: float
):
    def run(rank: int) -> torch.Tensor | None:
        mesh = dure.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        index, kind, each = rank // 2, *SCHEDULES[name]
        parts: list[nn.Module] = [_Terms(mesh["tp"], op), _TakesSum(), nn.Identity(), nn.Identity()]
        mine = [0, 3] if each == 2 and index == 0 else [1, 2] if each == 2 else [index]
        stages = [
            pp.PipelineStage(
                parts[i],
                i,
                2 * each,
                CPU,
                group=mesh["pp"].get_group(),
                get_mesh=(lambda *_: mesh["tp"]) if is_told else None,
            )
            for i in mine
        ]
        schedule = kind(stages if each == 2 else stages[0], 4, loss_fn=lambda y, _: y.sum())
        x = torch.arange(48.0, dtype=torch.float64).view(8, 6)
        last = 2 * each - 1 in mine
        output = schedule.step(*([x] if index == 0 else []), target=x if last else None)
        if output is not None:
            assert torch.equal(output, x * factor)
        return parts[0].get_parameter("weight").grad

    expected = torch.arange(48.0, dtype=torch.float64).view(8, 6).sum(0)[:, None].expand(6, 6)
    for rank, found in enumerate(run_ranks(4, run)):
        if rank < 2:  # of two terms each has its own gradient
            by = (rank + 1) * (0.5 if op == "avg" else 1.0)
            torch.testing.assert_close(found, expected * by / 4)


def test_one_scaler_decides_for_all_stages():
    """Only the last stage has a loss to scale; where it is inf, no stage steps."""

    def run(rank: int) -> list[tuple[bool, float]]:
        torch.manual_seed(rank)
        stage, is_bad = nn.Linear(4, 4), [False]
        optimizer, scaler = torch.optim.SGD(stage.parameters(), 0.1), dure.GradScaler("cpu", 8.0)

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            found = (output - target).square().mean()
            return scaler.scale(found * float("inf") if is_bad[0] else found)

        made = pp.PipelineStage(stage, rank, 2, torch.device("cpu"))
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


# --------------------------------------------------------------------------------------------------
# Experts divided over one axis of a mesh, in stages over another: the weights of one rank.


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
