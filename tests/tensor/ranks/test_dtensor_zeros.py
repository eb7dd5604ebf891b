"""Gradients that torch's formulas make of nothing, as those of `sgn`: zeros without memory."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dure.mesh import DeviceMesh
from dure.tensor import DTensor, Partial, Replicate, Shard
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_mesh

BEFORE: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda x, y: x,
    "a product": lambda x, y: x @ y,
    "a mean": lambda x, y: x.mean(0),
    "rows": lambda x, y: x[1:3],
    "a redistribution": lambda x, y: (x @ y).redistribute(placements=[Shard(1)]),
    "a part": lambda x, y: (
        DTensor.from_local(
            x.to_local(grad_placements=[Replicate()]) * 2, x.device_mesh, [Replicate()]
        )
        if x.placements == (Replicate(),)
        else x
    ),
}


@pytest.mark.parametrize("before", BEFORE)
@on_mesh(2)
def test_gradient_behind_sgn_is_zeros_with_the_placements_of_its_tensor(
    mesh: DeviceMesh, before: str
) -> None:
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        x = made(mesh, torch.arange(1.0, 25).reshape(6, 4), [placement]).requires_grad_()
        y = made(mesh, torch.arange(1.0, 25).reshape(4, 6), [Shard(0)]).requires_grad_()
        BEFORE[before](x, y).sgn().sum().backward()
        for one in (x, y):
            if one.grad is None:
                assert one is y
                continue
            assert isinstance(one.grad, DTensor)
            assert not any(p.is_partial() for p in one.grad.placements)
            one.grad.add_(1)  # it has memory
            assert torch.equal(one.grad.full_tensor(), torch.ones(one.shape))
