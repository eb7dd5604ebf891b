"""Low-rank adapters under tensor parallel plans, against one rank."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import pytest
import torch
from torch import nn

from dure.errors import UsageError
from dure.mesh import init_device_mesh
from dure.tensor import Replicate, Shard
from dure.tensor.debug import CommDebugMode
from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dure.testing import run_ranks
from tests.tensor.parallel.ranks.tensor_models import (
    assert_trained_alike,
    batches,
    small_llama,
    sp_plan,
    tp_plan,
    train,
)

RANK = 2


class LoRALinear(nn.Module):
    """As written by hand: the layer, two Linears, a factor."""

    def __init__(self, base: nn.Linear, dropout: float = 0.0):
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)
        self.dropout, self.scaling = nn.Dropout(dropout), 0.5

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(self.dropout(x))) * self.scaling


class NamedAdapters(nn.Module):
    """As peft's: adapters by name in dicts, each of which may be on or off."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_dropout = nn.ModuleDict({"a": nn.Identity(), "b": nn.Identity()})
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        for number, name in enumerate("ab"):
            self.lora_A[name] = nn.Linear(base.in_features, RANK + number, bias=False)
            self.lora_B[name] = nn.Linear(RANK + number, base.out_features, bias=True)
        self.active = ["a", "b"]

    def forward(self, x, *args, **kwargs):
        result = self.base_layer(x, *args, **kwargs)
        for name in self.active:
            cast = x.to(self.lora_A[name].weight.dtype)
            adapted = self.lora_B[name](self.lora_A[name](self.lora_dropout[name](cast)))
            result = result + adapted * 0.5
        return result


def adapt(model, kind):
    """Wrap every Linear of a model's blocks; what is there stays as it is, and what is new learns.

    Only the first rank's new weights are the right ones: the others' must come from there.
    """
    model.requires_grad_(False)
    for layer in model.layers.values():
        for block in (layer.attention, layer.mlp):
            for name, child in list(block.named_children()):
                setattr(block, name, kind(child).double())
    return model


def fill(model, rank):
    generator = torch.Generator().manual_seed(5 + rank)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.copy_(values / 4)
            parameter.requires_grad_()
    return model


@pytest.mark.parametrize(
    ("kind", "adapters_first", "plan"),
    [
        (LoRALinear, True, sp_plan),
        (LoRALinear, False, tp_plan),
        (NamedAdapters, True, tp_plan),
        (NamedAdapters, False, sp_plan),
    ],
)
def test_adapters_learn_as_on_one_rank(kind, adapters_first, plan):
    expected = train(fill(adapt(small_llama(), kind), 0))
    assert all(("lora" in name) == (name in expected[1][0]) for name in expected[2])

    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = small_llama()
        if not adapters_first:
            parallelize_module(model, mesh, plan())
        fill(adapt(model, kind), rank)
        parallelize_module(model, mesh, plan())
        assert_trained_alike(train(model), expected)

    run_ranks(2, body)


def test_adapters_lie_as_their_layer_and_add_no_communication_to_forward():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        counts = []
        for adapted in (False, True):
            model = small_llama()
            model = fill(adapt(model, LoRALinear), rank) if adapted else model
            parallelize_module(model, mesh, tp_plan())
            with CommDebugMode() as mode, torch.no_grad():
                model(batches(1)[0][:, :-1])
            counts.append(dict(mode.get_comm_counts()))
        assert counts[0] == counts[1]
        lies = {name: p.placements for name, p in model.named_parameters() if "lora" in name}
        for name, placements in lies.items():
            row = ".out." in name or ".down." in name
            cut = Shard(1) if row else Shard(0)
            assert placements == ((cut,) if ("lora_A" in name) == row else (Replicate(),)), name

    run_ranks(2, body)


def test_modules_that_are_not_adapters_are_refused():
    class Attention(nn.Module):
        def __init__(self, features):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, n) for n in (8, features, features, 8))

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        for module in (
            nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4)),
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
            Attention(8),
            Attention(4),
        ):
            with pytest.raises(UsageError, match="does not fit"):
                parallelize_module(module, mesh, ColwiseParallel())
        layer = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
        with pytest.raises(UsageError, match="already"):
            parallelize_module(layer, mesh, RowwiseParallel())

    run_ranks(2, body)
