"""Modules that DDP does not wrap."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from tests.thread_ranks import on_ranks


def linear() -> nn.Linear:
    return nn.Linear(1, 1, bias=False)


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
