"""`fsdp.explain`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import ModuleError
from dure.fsdp import MixedPrecisionPolicy, explain, fully_shard, strategy
from tests.thread_ranks import on_ranks

LOW = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("angles", torch.zeros(2, dtype=torch.bfloat16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x))) * self.scale


def made() -> Any:
    model = Net()
    model.first.bias.requires_grad_(False)
    fully_shard(model.first, mp_policy=LOW)
    fully_shard(model.second)
    fully_shard(model, ignored_params={model.scale})
    return model


@on_ranks(2)
def test_groups_are_told_with_their_bytes_and_strategy(rank: int, way: str) -> None:
    with strategy(way):
        model = made()
    found = explain(model)
    root, weight, _, second = found.groups
    assert [(g.module, g.trained, g.parameters) for g in found.groups] == [
        ("(root)", True, ("norm.weight", "norm.bias")),
        ("first", True, ("first.weight",)),
        ("first", False, ("first.bias",)),
        ("second", True, ("second.weight",)),
    ]
    assert root.dtype == torch.float32
    # first.weight [4, 3] float32: two rows per rank; it is unsharded in bfloat16.
    assert (weight.numel, weight.sharded_bytes, weight.whole_bytes) == (12, 2 * 3 * 4, 12 * 2)
    # second.weight [5, 4]: three rows and two.
    assert (second.numel, second.sharded_bytes) == (20, (3, 2)[rank] * 4 * 4)
    assert second.whole_bytes == 20 * 4
    assert (weight.dtype, second.dtype) == (torch.bfloat16, torch.float32)
    assert {g.strategy for g in found.groups} == {way}
    why = {"gathered": "asked for", "shared": "CPU parameters, ranks on one host"}
    assert {g.why for g in found.groups} == {why[way]}
    assert found.plain == ("scale",)
    assert found.buffers == {"angles": torch.bfloat16}


@on_ranks(2)
def test_the_order_of_gathers_is_told_once_it_is_known(rank: int, way: str) -> None:
    with strategy(way):
        model = made()
    before = explain(model)
    assert (before.forward, before.backward) == ((), ())
    model(torch.ones(2, 3)).sum().backward()
    found = explain(model)
    assert found.forward == ("(root)", "first", "second")
    assert found.backward == ("second", "first")  # the root stays unsharded until then
    model.second.set_modules_to_forward_prefetch([model.first])
    assert explain(model).forward[2] == "second (with first)"


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ModuleError) as error:
        explain(nn.Linear(2, 2))
    assert error.value.op == "fsdp.explain"
