"""Sharded modules that are moved between steps: gradients are averaged as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dure.fsdp import fully_shard, strategy
from tests.thread_ranks import on_ranks

WAYS: dict[str, Callable[[nn.Module], object]] = {
    "dtype and back": lambda m: m.double().float(),
    "other memory": lambda m: m._apply(lambda t: t.clone()),
    "left in another dtype": lambda m: m.double(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["shared", "gathered"])
@on_ranks(2)
def test_moved_module_goes_on_averaging_2_ranks(rank: int, how: str, way: str) -> None:
    """Rank r has the inputs (1, 2) and (3, 4), times r + 1; the loss is the sum of the outputs."""

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    with strategy(how):
        fully_shard(model[0])
        fully_shard(model)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)
    for set_to_none in (True, False, True):
        weight: Any = model[0].weight
        model(x.to(weight.dtype)).sum().backward()
        model.zero_grad(set_to_none)
        WAYS[way](model)
    weight = model[0].weight
    model(x.to(weight.dtype)).sum().backward()
    assert weight.grad.full_tensor().tolist() == [[12.0, 18.0], [12.0, 18.0]]
    assert weight.grad.dtype == weight.dtype
