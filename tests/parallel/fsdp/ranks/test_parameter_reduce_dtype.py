"""Gradients that are pending over tensor-parallel ranks are reduced in `reduce_dtype`, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure.fsdp import MixedPrecisionPolicy, fully_shard, strategy
from dure.mesh import DeviceMesh
from dure.tensor import DTensor
from dure.tensor.parallel import SequenceParallel, parallelize_module
from tests.parallel.pending_terms import SMALL, Scale, backward, rows
from tests.thread_ranks import on_mesh


@pytest.mark.parametrize("way", ["shared", "gathered"])
@pytest.mark.parametrize("num_backwards", [1, 3])
@pytest.mark.parametrize(
    ("reduce_dtype", "each"),
    [(torch.float32, 1 + SMALL), (None, 1.0)],
    ids=["float32", "in param_dtype"],
)
@on_mesh(2, 2, names=("dp", "tp"))
def test_terms_are_added_in_reduce_dtype_with_and_without_accumulation_4_ranks(
    mesh: DeviceMesh, way: str, num_backwards: int, reduce_dtype: torch.dtype | None, each: float
) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    with strategy(way):
        model: Any = fully_shard(Scale(mesh["tp"]), mesh=mesh["dp"], mp_policy=policy)
    x = rows(mesh)
    for number in range(num_backwards):
        model.set_requires_gradient_sync(number == num_backwards - 1)
        backward(model, x)
    assert model.weight.grad.dtype == torch.float32
    assert model.weight.grad.full_tensor().tolist() == [each * num_backwards] * 2


@pytest.mark.parametrize("way", ["shared", "gathered"])
@on_mesh(2, 2, names=("dp", "tp"))
def test_norm_under_sequence_parallelism_is_reduced_in_float32_4_ranks(
    mesh: DeviceMesh, way: str
) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    norm: Any = parallelize_module(nn.LayerNorm(4), mesh["tp"], SequenceParallel())
    with strategy(way):
        fully_shard(norm, mesh=mesh["dp"], mp_policy=policy)
    out = norm(torch.ones(1, 1, 4))
    local = out.to_local() if isinstance(out, DTensor) else out
    by = SMALL if mesh.get_local_rank("tp") else 1.0
    local.backward(torch.full_like(local, by))
    assert norm.bias.grad.full_tensor().tolist() == [1 + SMALL] * 4
