"""What DDP verifies and refuses: modules that differ, cannot be wrapped, or changed afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from dure.testing import CommRecorder, run_ranks
from tests.parallel.ddp.ddp_models import Branches
from tests.thread_ranks import on_ranks


def linear() -> nn.Linear:
    return nn.Linear(1, 1, bias=False)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m[0].double(), "0.weight"),
        (lambda m: m.append(nn.Linear(1, 1)), "2.weight"),
        (lambda m: m[0].bias.requires_grad_(False), "0.bias"),
        (lambda m: m[1].register_buffer("extra", torch.ones(1)), "1.extra"),
        (lambda m: m.insert(0, nn.Identity()), "0.weight"),
    ],
    ids=["dtype", "count", "frozen", "buffer", "name"],
)
def test_any_difference_between_models_is_named_on_all_ranks_3_ranks(
    change: Any, name: str
) -> None:
    def rank_main(rank: int) -> ModuleError:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        if rank == 1:
            change(model)
        with pytest.raises(ModuleError) as caught:
            dist.DistributedDataParallel(model)
        return caught.value

    for error in run_ranks(3, rank_main):
        assert name in error.parameters
        assert "ranks 0, 2 have" in error.seen and "rank 1 has" in error.seen


REFUSED: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "empty": (nn.Module(), {}),
    "frozen": (linear().requires_grad_(False), {}),
    "device of a module on the CPU": (linear(), {"device_ids": [0]}),
    "only buffers": (nn.BatchNorm1d(1, affine=False), {}),
    "buckets without bytes": (linear(), {"bucket_cap_mb": 0}),
    "delayed parameters": (linear(), {"delay_all_reduce_named_params": []}),
    "not a mesh": (linear(), {"device_mesh": object()}),
    "not a precision": (linear(), {"mixed_precision": torch.bfloat16}),
    "torch's batch norm": (nn.Sequential(linear(), nn.SyncBatchNorm(1)), {}),
    "lazy": (nn.Sequential(linear(), nn.LazyLinear(1)), {}),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(1)
def test_module_that_cannot_be_wrapped_is_refused_1_rank(rank: int, case: str) -> None:
    module, options = REFUSED[case]

    with pytest.raises(ModuleError) as caught:
        dist.DistributedDataParallel(module, **options)
    assert isinstance(caught.value, RuntimeError)  # what programs written for torch catch


@on_ranks(1)
def test_wrapping_twice_is_refused_unless_ignored_1_rank(rank: int) -> None:
    ignore = dist.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    whole = nn.Sequential(linear(), dist.DistributedDataParallel(nn.Linear(1, 1)))
    with pytest.raises(ModuleError) as caught:
        dist.DistributedDataParallel(whole)
    ignore(whole, caught.value.parameters)
    dist.DistributedDataParallel(whole)
    with pytest.raises(ModuleError):
        ignore(whole, ["x"])
    assert caught.value.parameters == ("1.module.weight", "1.module.bias")


@on_ranks(2)
def test_parameter_unfrozen_after_wrapping_is_named_2_ranks(rank: int) -> None:
    module = Branches()
    module.right.requires_grad_(False)
    ddp = dist.DistributedDataParallel(module)
    ddp(torch.ones(1, 2), "left").backward()
    module.right.requires_grad_(True)
    with pytest.raises(ModuleError) as caught:
        ddp(torch.ones(1, 2), "left")
    dist.DistributedDataParallel(ddp.module)(torch.ones(1, 2), "left", "right").backward()
    assert caught.value.parameters == ("right.weight",)


@on_ranks(2)
def test_functional_call_leaves_gradients_to_its_caller_2_ranks(rank: int) -> None:
    ddp = dist.DistributedDataParallel(linear())
    weight = torch.ones(1, 1, requires_grad=True)
    x = torch.full((1, 1), rank + 1.0)
    with CommRecorder() as seen:
        torch.func.functional_call(ddp, {"module.weight": weight}, x).sum().backward()
    assert seen.ops == []
    assert ddp.module.weight.grad is None
    ddp(x).sum().backward()
    assert ddp.module.weight.grad.item() == 1.5
    assert weight.grad.item() == [1.0, 2.0][rank]


def one_replaced(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.ones(1, 1))


def all_replaced(module: nn.Linear) -> None:
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


@pytest.mark.parametrize(
    ("replace", "names"), [(one_replaced, ("weight",)), (all_replaced, ("weight", "bias"))]
)
@on_ranks(2)
def test_parameters_replaced_for_good_are_named_2_ranks(
    rank: int, replace: Any, names: tuple[str, ...]
) -> None:
    module = nn.Linear(1, 1)
    ddp = dist.DistributedDataParallel(module)
    replace(module)
    with pytest.raises(ModuleError) as caught:
        ddp(torch.ones(1, 1)).sum().backward()
    assert caught.value.parameters == names


def test_buckets_of_listed_sizes_1_rank() -> None:
    def rank_main(rank: int) -> object:
        layers = [nn.Linear(64, 64, bias=False) for _ in range(5)]  # 1/64 MiB each
        caps = [1 / 64, 2 / 64]
        ddp = dist.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb_list=caps)
        return ddp._get_ddp_logging_data()["bucket_sizes"]

    one = 64 * 64 * 4
    assert run_ranks(1, rank_main) == [f"{one}, {2 * one}, {2 * one}"]
