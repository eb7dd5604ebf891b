"""Sharded parameters: made on the meta device, assigned, moved, read in inference mode, hooked."""

# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.fsdp import MixedPrecisionPolicy
from dure.mesh import init_device_mesh
from dure.tensor import DTensor, Shard, distribute_tensor
from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import (
    Net,
    assert_same,
    by_parts,
    by_step,
    expected_gradients,
    full_gradients,
    full_weights,
    made,
    making,
    sharded,
    whole,
)
from tests.parallel.pending_terms import SMALL, Scale, backward, rows
from tests.thread_ranks import on_mesh, on_ranks

# ---------------------------------------------------------------- without memory at first


def on_meta(way: str, **options: Any) -> Any:
    with torch.device("meta"):
        model = Net(**options).double()
    return sharded(way, model)


@on_ranks(2)
def test_a_model_is_sharded_and_trained_within_a_block_of_another_device(rank, way):
    """The block gives the model its device; Dure's own tensors stay on the CPU."""

    with torch.device("meta"):
        model = sharded(way, Net().double())
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        model(torch.tensor([[rank, 2], [3, 4]], device="cpu")).sum().backward()
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, rank)
        assert gathered == [0, 1]
        total = dist.clip_grad_norm_(model.parameters(), 1.0)
    assert total.device.type == "cpu" and total > 0


@on_ranks(2)
def test_shards_have_their_last_memory_when_to_empty_returns(rank, way):
    """Or a rank would have its part twice until the first forward, while weights are loaded."""
    model = on_meta(way)
    model.to_empty(device="cpu")
    before = {name: p.to_local().data_ptr() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model(torch.tensor([[rank, 2], [3, 4]])).sum().backward()
    assert {name: p.to_local().data_ptr() for name, p in model.named_parameters()} == before


def test_weights_assigned_before_an_unshard_are_kept(way):
    """A program may look at its parameters after loading, before the first step."""

    def body(rank: int) -> Any:
        model = on_meta(way)
        full = made().state_dict()
        shards = model.state_dict()
        for name, value in full.items():
            like = shards[name]
            shards[name] = distribute_tensor(value, like.device_mesh, like.placements)
        model.load_state_dict(shards, assign=True)
        dist.barrier()
        model.unshard()
        assert model.embed.weight.device.type == "cpu"
        model.reshard()
        dist.barrier()
        assert_same(full_weights(model), full)
        by_step(model, 0, 2, rank)
        return full_gradients(model)

    for found in run_ranks(2, body):
        assert_same(found, expected_gradients())


@pytest.mark.parametrize("is_begun", [False, True])
@on_ranks(2)
def test_weights_assigned_while_unsharded_are_kept(rank, way, is_begun):
    """Within the module that was sharded, which does not notice it; or while it is gathered."""

    model: Any = nn.Sequential(nn.Linear(2, 2, bias=False))
    by_parts(way, model)
    mesh = model[0].weight.device_mesh
    values = distribute_tensor(torch.full((2, 2), 5.0), mesh, [Shard(0)])
    handle = model.unshard(async_op=True)
    if not is_begun:
        handle.wait()
    model[0].load_state_dict({"weight": values}, assign=True)
    handle.wait()
    model.reshard()
    assert model[0].weight.full_tensor().tolist() == [[5, 5], [5, 5]]
    assert model(torch.ones(1, 2)).tolist() == [[10, 10]]


@on_ranks(2)
def test_one_of_the_parameters_of_a_group_is_assigned(rank, way):
    model: Any = nn.Linear(2, 2)
    nn.init.ones_(model.bias)
    by_parts(way, model)
    model(torch.ones(1, 2)).sum().backward()
    mesh = model.weight.device_mesh
    values = distribute_tensor(torch.full((2, 2), 5.0), mesh, [Shard(0)])
    model.load_state_dict({"weight": values}, strict=False, assign=True)
    assert model(torch.ones(1, 2)).tolist() == [[11, 11]]  # leaves it unsharded
    model.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]))
    out = model(torch.ones(1, 2))
    assert out.tolist() == [[3, 3]]
    out.sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[1, 1], [1, 1]]


# ---------------------------------------------------------------- in inference mode


MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}
X = torch.tensor([[1.0, 2.0]])


def doubling(way: str, tensor_parallel: bool, **options: Any) -> Any:
    """Return y = b(a(x)); a doubles, b adds both numbers."""
    with making:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(2 * torch.eye(2))
        model[1].weight.fill_(1)
    if tensor_parallel:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        options["mesh"] = mesh["dp"]
    return by_parts(way, model, model[0], **options)


@pytest.mark.parametrize("tensor_parallel", [False, True])
@pytest.mark.parametrize(
    "order",
    [
        ("inference", "grad", "inference", "grad"),
        ("no_grad", "inference", "grad", "inference"),
    ],
    ids="-".join,
)
def test_forwards_in_any_mode_and_training_between_are_right(way, order, tensor_parallel):
    def body(rank: int) -> None:
        model = doubling(way, tensor_parallel)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        expected = 6.0
        for mode in order:
            optimizer.zero_grad()
            with MODES[mode]():
                out = model(X)
            assert out.item() == expected
            if mode == "grad":
                out.backward()
                if expected == 6:
                    assert whole(model[0].weight.grad).tolist() == [[1.0, 2.0], [1.0, 2.0]]
                    assert whole(model[1].weight.grad).tolist() == [[2.0, 4.0]]
                    optimizer.step()  # a: [[1.5, -1], [-0.5, 1]], b: [0, -1]
                    expected = -1.5

    run_ranks(2, body)


# ---------------------------------------------------------------- moved between steps


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "dtype and back": lambda m: m.double().float(),
    "other memory": lambda m: m._apply(lambda t: t.clone()),
    "left in another dtype": lambda m: m.double(),
}


@pytest.mark.parametrize("move", MOVES)
@on_ranks(2)
def test_moved_module_goes_on_averaging_2_ranks(rank, way, move):
    """Rank r has the inputs (1, 2) and (3, 4), times r + 1; the loss is the sum of the outputs."""

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    by_parts(way, model, model[0])
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)
    for set_to_none in (True, False, True):
        weight: Any = model[0].weight
        model(x.to(weight.dtype)).sum().backward()
        model.zero_grad(set_to_none)
        MOVES[move](model)
    weight = model[0].weight
    model(x.to(weight.dtype)).sum().backward()
    assert weight.grad.full_tensor().tolist() == [[12.0, 18.0], [12.0, 18.0]]
    assert weight.grad.dtype == weight.dtype


# ---------------------------------------------------------------- pending reductions


@pytest.mark.parametrize(("reduce_dtype", "each"), [(torch.float32, 1 + SMALL), (None, 1.0)])
@on_mesh(2, 2, names=("dp", "tp"))
def test_terms_are_added_in_reduce_dtype_and_accumulated_4_ranks(mesh, way, reduce_dtype, each):
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    model: Any = by_parts(way, Scale(mesh["tp"]), mesh=mesh["dp"], mp_policy=policy)
    x = rows(mesh)
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        backward(model, x)
    assert model.weight.grad.dtype == torch.float32
    assert model.weight.grad.full_tensor().tolist() == [each * 2] * 2


# ---------------------------------------------------------------- hooks of the program


SIZE, LR = 2, 0.25


def two_layers() -> Any:
    """Return two layers; the loss is the sum of what the second gives for ones."""
    with making:
        model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(8.0).view(4, 2))
        model[1].weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    return model


# For an input [2, 1] that each rank multiplies by rank + 1: the mean over the ranks is 1.5 of it.
GRADIENT_0 = 1.5 * torch.tensor([[2.0, 1.0], [4.0, 2.0], [6.0, 3.0], [8.0, 4.0]])
GRADIENT_1 = 1.5 * torch.tensor([[1.0, 7.0, 13.0, 19.0]])


def by_layers(way: str, model: Any = None) -> Any:
    model = two_layers() if model is None else model
    return by_parts(way, model, *model)


def sum_backward(model: Any, rank: int, **how: Any) -> None:
    model(torch.tensor([[2.0, 1.0]]) * (rank + 1)).sum().backward(**how)


def full(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


@on_ranks(SIZE)
def test_hooks_run_once_per_gradient_after_the_reduction(rank, way):
    model = by_layers(way)
    seen: list[tuple[str, Any]] = []
    first, second = model.parameters()
    first.register_hook(lambda g: seen.append(("tensor", full(g))))
    second.register_hook(lambda g: g * 2)
    first.register_post_accumulate_grad_hook(lambda p: seen.append(("after", full(p.grad))))
    handle = second.register_post_accumulate_grad_hook(lambda p: seen.append(("gone", None)))
    handle.remove()
    sum_backward(model, rank)
    assert [name for name, _ in seen] == ["tensor", "after"]
    assert all(torch.equal(tensor, GRADIENT_0) for _, tensor in seen)
    assert torch.equal(full(second.grad), 2 * GRADIENT_1)
    sum_backward(model, rank)
    assert [name for name, _ in seen] == ["tensor", "after"] * 2
    assert torch.equal(seen[-1][1], 2 * GRADIENT_0)  # with the first sum_backward's


@on_ranks(SIZE)
def test_a_hook_of_several_parameters_runs_once_with_all_gradients(rank, way):
    model = by_layers(way)
    seen: list[list[torch.Tensor]] = []
    torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda gradients: seen.append([full(g) for g in gradients])
    )
    sum_backward(model, rank)
    assert len(seen) == 1
    assert torch.equal(seen[0][0], GRADIENT_0)
    assert torch.equal(seen[0][1], GRADIENT_1)


def test_an_optimizer_may_step_in_backward(way):
    """Two steps, as one process makes them; hooks were registered before `fully_shard`."""

    def stepping(model: Any) -> None:
        optimizers: dict[str, torch.optim.Optimizer] = {}

        def step(name: str, parameter: Any) -> None:
            if name not in optimizers:
                optimizers[name] = torch.optim.SGD([parameter], lr=LR)
            optimizers[name].step()
            parameter.grad = None

        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: step(name, p))

    one = two_layers()
    stepping(one)
    for _ in range(2):
        one(torch.tensor([[2.0, 1.0]]) * 1.5).sum().backward()

    def body(rank: int) -> list[torch.Tensor]:
        model = two_layers()
        stepping(model)
        by_layers(way, model)
        for _ in range(2):
            sum_backward(model, rank)
        assert all(p.grad is None for p in model.parameters())
        return [full(p) for p in model.parameters()]

    for weights in run_ranks(SIZE, body):
        for found, expected in zip(weights, one.parameters(), strict=True):
            assert torch.equal(found, expected.detach())
