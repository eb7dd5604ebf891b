"""Gradients that are reduced to shards: how they are stored."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import torch
from torch import nn

from dure.fsdp import fully_shard
from dure.tensor import Shard
from dure.testing import run_ranks


def test_a_gradient_of_uneven_columns_has_the_strides_of_its_shard() -> None:
    weight = torch.arange(20.0).reshape(4, 5)

    def body(rank: int) -> None:
        model = nn.Linear(5, 4, bias=False)
        with torch.no_grad():
            model.weight.copy_(weight)
        fully_shard(model, shard_placement_fn=lambda p: Shard(1))
        model(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum().backward()
        grad = model.weight.grad.to_local()
        assert grad.stride() == model.weight.to_local().stride() == ((3, 1), (2, 1))[rank]
        torch.optim.SGD(model.parameters(), lr=1.0, fused=True).step()
        expected = weight - torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
        assert torch.equal(model.weight.full_tensor(), expected)

    run_ranks(2, body)
