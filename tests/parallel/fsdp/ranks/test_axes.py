"""Fully sharded training over several axes of a mesh: replicas, named axes, tensor parallel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dure.device_mesh import DeviceMesh, init_device_mesh
from dure.fsdp import CPUOffloadPolicy, DataParallelMeshDims
from dure.parallel.fsdp import axes
from dure.tensor import Replicate, Shard
from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dure.tensor.placement_types import StridedShard
from tests.parallel.fsdp.ranks.fsdp_models import Net, compare, made, making, shard


@pytest.mark.parametrize(
    ("options", "placements"),
    [
        ({}, (Replicate(), Shard(0))),
        ({"dp_mesh_dims": DataParallelMeshDims(shard="b", replicate="a")}, (Replicate(), Shard(0))),
        ({"dp_mesh_dims": DataParallelMeshDims(shard=("a", "b"))}, (Shard(0),)),
    ],
)
def test_replicas_and_shards(way: str, options: dict[str, Any], placements: Any) -> None:
    def prepare(model: Net) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(), **options)
        assert model.head.weight.placements == placements

    compare(way, 4, prepare=prepare)


@pytest.mark.parametrize("axes", [(2, 2), (1, 2), (2, 1)])
def test_over_tensor_parallel(way: str, axes: tuple[int, int]) -> None:
    def prepare(model: Net) -> None:
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        shard(model, mesh=mesh["dp"])
        assert model.blocks[0].down.weight.placements == (Shard(0), Shard(1))
        if axes[1] > 1:
            cut = StridedShard(0, split_factor=axes[1])
            assert model.blocks[0].up.weight.placements == (cut, Shard(0))

    def wide() -> Net:
        model = made()
        with making:
            torch.manual_seed(2)
            for block in model.blocks:
                block.up, block.down = nn.Linear(6, 10).double(), nn.Linear(10, 6).double()
        return model

    compare(
        way,
        axes[0] * axes[1],
        prepare=prepare,
        make=wide,
        data_ranks=lambda rank: (axes[0], rank // axes[1]),
    )


@pytest.mark.parametrize(
    ("parameters", "kinds", "has_gpu", "used"),
    [
        ("cuda", {"cuda"}, True, "cuda"),
        ("cpu", {"cpu", "cuda"}, True, "cpu"),
        ("cuda", {"cpu", "cuda"}, True, "cuda"),
        ("meta", {"cpu", "cuda", "meta"}, True, "cuda"),
        ("meta", {"cpu", "cuda", "meta"}, False, "cpu"),
        ("meta", {"cpu"}, True, "cpu"),
        ("cuda", {"cpu"}, True, "cpu"),  # the parameters are refused then
    ],
)
def test_mesh_that_is_not_given_is_on_the_device_of_the_parameters(
    monkeypatch: pytest.MonkeyPatch, parameters: str, kinds: set[str], has_gpu: bool, used: str
) -> None:
    def from_group(group: object, kind: str) -> None:
        raise LookupError(kind)

    monkeypatch.setattr(axes, "resolve", lambda *_: SimpleNamespace(device_types=frozenset(kinds)))
    monkeypatch.setattr(DeviceMesh, "from_group", from_group)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    with pytest.raises(LookupError) as asked:
        axes.DataAxes.of(None, None, parameters)
    assert asked.value.args == (used,)
