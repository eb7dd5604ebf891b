"""A wrapped module whose parameters are not the ones it was wrapped with."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from dure.testing import CommRecorder, run_ranks


def test_functional_call_leaves_gradients_to_its_caller_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        ddp = dist.DistributedDataParallel(nn.Linear(1, 1))
        weight = torch.ones(1, 1, requires_grad=True)
        bias = torch.zeros(1, requires_grad=True)
        given = {"module.weight": weight, "module.bias": bias}
        with CommRecorder() as seen:
            result = torch.func.functional_call(ddp, given, torch.full((1, 1), rank + 1.0))
            result.sum().backward()
        assert seen.ops == []
        assert weight.grad is not None
        assert weight.grad.item() == rank + 1
        assert ddp.module.weight.grad is None
        ddp(torch.ones(1, 1)).sum().backward()
        assert ddp.module.weight.grad is not None

    run_ranks(2, rank_main)


def test_parameter_replaced_for_good_is_named_by_forward_2_ranks() -> None:
    def rank_main(_: int) -> None:
        module = nn.Linear(1, 1)
        ddp = dist.DistributedDataParallel(module)
        module.weight = nn.Parameter(torch.ones(1, 1))
        with pytest.raises(ModuleError) as caught:
            ddp(torch.ones(1, 1))
        assert caught.value.parameters == ("weight",)

    run_ranks(2, rank_main)


def test_parameters_all_replaced_for_good_are_named_by_backward_2_ranks() -> None:
    def rank_main(_: int) -> None:
        module = nn.Linear(1, 1)
        ddp = dist.DistributedDataParallel(module)
        module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
        with pytest.raises(ModuleError) as caught:
            ddp(torch.ones(1, 1)).sum().backward()
        assert caught.value.parameters == ("weight", "bias")

    run_ranks(2, rank_main)
