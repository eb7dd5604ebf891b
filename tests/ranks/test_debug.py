"""Replicas that differ are found, on all ranks alike."""

# pyright: reportArgumentType=false

from __future__ import annotations

import pytest
import torch

import dure as dist
from dure.debug import check_replicas
from dure.errors import ReplicasDiffer
from dure.tensor import DTensor, Replicate, Shard, init_device_mesh
from dure.testing import run_ranks


def layer(rank: int, odd: int | None) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    if rank == odd:
        torch.nn.init.zeros_(model[0].bias)
    return model


def test_a_plain_parameter_is_the_same_on_all_ranks():
    def body(rank):
        check_replicas(layer(rank, None), step=1)
        with pytest.raises(ReplicasDiffer) as caught:
            check_replicas(layer(rank, 2), step=7)
        check_replicas(layer(rank, 2), group=dist.new_group([0, 1])) if rank < 2 else (
            dist.new_group([0, 1])
        )
        return caught.value.parameter, caught.value.step, caught.value.ranks

    assert run_ranks(4, body) == [("0.bias", 7, ((0, 1, 3), (2,)))] * 4


def test_a_dtensor_is_the_same_where_its_shards_are():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        tp = mesh.get_local_rank(1)
        model = torch.nn.Module()
        part = torch.full((2,), float(tp))
        tensor = DTensor.from_local(part, mesh, [Replicate(), Shard(0)])
        model.weight = torch.nn.Parameter(tensor)
        check_replicas(model)
        if rank == 3:
            part += 1
        with pytest.raises(ReplicasDiffer) as caught:
            check_replicas(model)
        return caught.value.ranks

    assert run_ranks(4, body) == [((1,), (3,))] * 4


def test_a_module_without_parameters_is_fine():
    run_ranks(2, lambda rank: check_replicas(torch.nn.ReLU()))
