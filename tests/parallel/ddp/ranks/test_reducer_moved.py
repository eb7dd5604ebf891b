"""DDP over a module that was moved after wrapping: gradients are averaged, or all ranks raise.

Rank r has the inputs (1, 2) and (3, 4), times r + 1, and the loss is the sum of the outputs, so
that the mean gradient over two ranks is (6, 9) in each row of the weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from dure.mesh import init_device_mesh
from dure.parallel.ddp.replicate import replicate
from dure.tensor.parallel import ColwiseParallel, parallelize_module
from tests.thread_ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:find_unused_parameters")
MEAN = [[6.0, 9.0], [6.0, 9.0]]

WAYS: dict[str, Callable[[nn.Module], object]] = {
    "dtype and back": lambda m: m.double().float(),
    "other memory": lambda m: m._apply(lambda t: t.clone()),
    "to the same": lambda m: m.to("cpu", torch.float32),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "reduced in bfloat16": {"mixed_precision": dist.MixedPrecision(reduce_dtype=torch.bfloat16)},
}


@pytest.fixture(params=[False, True], ids=["data", "swap"])
def swap(request: pytest.FixtureRequest) -> Iterator[bool]:
    """How torch changes parameters: it assigns `data`, or swaps the tensors (as for DTensors)."""
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(False)


def inputs(rank: int) -> torch.Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)


def step(ddp: nn.Module, rank: int) -> None:
    ddp(inputs(rank).to(next(ddp.parameters()).dtype)).sum().backward()


def gradient(ddp: nn.Module) -> list[list[float]]:
    weight = next(ddp.parameters())
    assert weight.grad is not None
    return weight.grad.tolist()


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2)
def test_moved_module_goes_on_averaging_2_ranks(rank: int, options: str, swap: bool) -> None:
    for way, set_to_none in itertools.product(WAYS, (True, False)):
        ddp = dist.DistributedDataParallel(nn.Linear(2, 2), **OPTIONS[options])
        for _ in range(3):
            step(ddp, rank)
            ddp.zero_grad(set_to_none)
        WAYS[way](ddp)
        for _ in range(2):
            step(ddp, rank)
            assert gradient(ddp) == MEAN, (way, set_to_none)
            ddp.zero_grad(set_to_none)


@on_ranks(2)
def test_part_that_was_moved_goes_on_averaging_2_ranks(rank: int, swap: bool) -> None:
    way = "dtype and back"
    ddp = dist.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with torch.no_grad():
        for p in ddp.parameters():
            p.fill_(1)
    step(ddp, rank)
    ddp.zero_grad(set_to_none=False)
    WAYS[way](ddp.module[0])
    step(ddp, rank)
    assert gradient(ddp) == [[12.0, 18.0], [12.0, 18.0]]


@on_ranks(2)
def test_sums_without_sync_are_kept_over_a_move_2_ranks(rank: int, swap: bool) -> None:
    way = "other memory"
    ddp = dist.DistributedDataParallel(nn.Linear(2, 2))
    step(ddp, rank)
    ddp.zero_grad()
    with ddp.no_sync():
        step(ddp, rank)
    WAYS[way](ddp)
    with ddp.no_sync():
        step(ddp, rank)
    step(ddp, rank)
    assert gradient(ddp) == [[18.0, 27.0], [18.0, 27.0]]


@on_ranks(2)
def test_gradient_left_from_before_a_move_is_kept_where_no_rank_uses_it_2_ranks(
    rank: int, swap: bool
) -> None:
    way = "dtype and back"
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.forward = lambda x, first: model[0](x) if first else model[1](x)  # type: ignore[method-assign]
    ddp = dist.DistributedDataParallel(model, find_unused_parameters=True)
    for first in (False, True):
        ddp(inputs(rank), first).sum().backward()
    WAYS[way](ddp)
    ddp(inputs(rank), False).sum().backward()
    assert gradient(ddp) == MEAN
    assert model[1].weight.grad.tolist() == [[12.0, 18.0], [12.0, 18.0]]


@pytest.mark.parametrize(
    ("who", "kept", "options"),
    [((0, 1), False, "plain"), ((1,), True, "unused"), ((1,), False, "plain")],
    ids=["all", "one rank, with a sum", "one rank"],
)
@on_ranks(2)
def test_module_left_in_another_dtype_is_refused_on_all_ranks_2_ranks(
    rank: int, who: tuple[int, ...], kept: bool, options: str, swap: bool
) -> None:
    ddp = dist.DistributedDataParallel(nn.Linear(2, 2), **OPTIONS[options])
    step(ddp, rank)
    ddp.zero_grad()
    with ddp.no_sync() if kept else nullcontext():
        step(ddp, rank)
    if rank in who:
        ddp.double()
    with pytest.raises(ModuleError) as caught:
        step(ddp, rank)
    assert "Wrap the module again" in str(caught.value)
    assert set(caught.value.parameters) == {"weight", "bias"}
    assert f"on rank {', '.join(map(str, who))})" in caught.value.seen
    ddp.float()
    ddp.zero_grad()
    step(ddp, rank)
    assert gradient(ddp) == MEAN


@on_ranks(2)
def test_module_that_was_moved_can_be_wrapped_again_2_ranks(rank: int, swap: bool) -> None:
    ddp = dist.DistributedDataParallel(nn.Linear(2, 2))
    step(ddp, rank)
    ddp.double()
    again = dist.DistributedDataParallel(ddp.module)
    again.zero_grad()
    step(again, rank)
    assert gradient(again) == MEAN
    assert next(again.parameters()).grad.dtype == torch.float64


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_gradients_follow_the_strides_that_parameters_get_2_ranks(
    rank: int, set_to_none: bool
) -> None:
    ddp: Any = dist.DistributedDataParallel(nn.Conv2d(2, 3, 2, bias=False))
    image = torch.arange(36.0).view(1, 2, 3, 6) * (rank + 1)
    ddp(image).sum().backward()
    wanted = ddp.module.weight.grad.clone()
    ddp.zero_grad(set_to_none)
    ddp.to(memory_format=torch.channels_last)
    ddp(image).sum().backward()
    weight = ddp.module.weight
    assert weight.grad.stride() == weight.stride() == (8, 1, 4, 2)
    assert torch.equal(weight.grad, wanted)


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(4)
def test_moved_module_of_dtensors_goes_on_averaging_4_ranks(rank: int, set_to_none: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Linear(2, 2), mesh["tp"], ColwiseParallel())
    ddp = dist.DistributedDataParallel(model, mesh=mesh["dp"])
    for way in WAYS.values():
        step(ddp, rank // 2)
        ddp.zero_grad(set_to_none)
        way(ddp)
    step(ddp, rank // 2)
    assert model.weight.grad.to_local().tolist() == [MEAN[rank % 2]]


@on_ranks(2)
def test_replicated_module_that_was_moved_goes_on_averaging_2_ranks(rank: int, swap: bool) -> None:
    module = replicate(nn.Linear(2, 2))
    for set_to_none in (False, True):
        step(module, rank)
        module.zero_grad(set_to_none)
        module.double().float()
        step(module, rank)
        assert gradient(module) == MEAN
        module.zero_grad()


@pytest.mark.parametrize("options", ["plain", "unused", "static"])
@pytest.mark.parametrize("change", ["parameter", "layer"])
@on_ranks(2)
def test_replaced_parameter_is_refused_whatever_may_be_unused_2_ranks(
    rank: int, options: str, change: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    ddp = dist.DistributedDataParallel(model, **OPTIONS[options])
    step(ddp, rank)
    if change == "layer":
        model[1] = nn.Linear(2, 2, bias=False)
    else:
        model[1].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ModuleError) as caught:
        step(ddp, rank)
    assert caught.value.parameters == ("1.weight",)
    assert "replaced" in str(caught.value)


@on_ranks(2)
def test_parametrized_parameter_is_not_taken_for_replaced_2_ranks(rank: int) -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model.forward = lambda x, i: model[i](x)  # type: ignore[method-assign]
    ddp = dist.DistributedDataParallel(model, find_unused_parameters=True)
    ddp(inputs(rank), 0).sum().backward()
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    ddp.zero_grad()
    ddp(inputs(rank), 0).sum().backward()
    assert gradient(ddp) == MEAN
