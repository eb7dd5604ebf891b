"""Replicas that differ are found, on all ranks alike."""

# pyright: reportArgumentType=false

from __future__ import annotations

import pytest
import torch

import dure as dist
from dure.debug import check_batch, check_replicas
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


def test_what_ranks_of_a_tensor_group_have_read_is_compared():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp = mesh.get_local_rank("dp")
        batch = {"ids": torch.full((2, 3), dp), "more": [torch.zeros(2), ("name", 3 + dp)]}
        check_batch(batch, mesh)
        check_batch(batch, mesh["tp"])
        check_batch(torch.tensor(rank), mesh["dp"])  # all are to differ
        if rank == 1:
            batch["more"][0] = torch.ones(2)
        if dp == 1:
            check_batch(batch, mesh, step=4)
            return None
        with pytest.raises(ReplicasDiffer) as caught:
            check_batch(batch, mesh, step=4)
        return caught.value.parameter, caught.value.step, caught.value.ranks

    found = ("batch['more'][0]", 4, ((0,), (1,)))
    assert run_ranks(4, body) == [found, found, None, None]


@pytest.mark.parametrize(
    ("odd", "name"),
    [
        ({"a": torch.zeros(2), "b": torch.ones(2)}, "batch['b']"),
        ({"a": torch.zeros(1, 2)}, "batch['a']"),
        ({"a": torch.zeros(2, dtype=torch.int32)}, "batch['a']"),
        ([torch.zeros(2)], "batch['a']"),
        ({}, "batch['a']"),
    ],
)
def test_batches_of_another_structure_differ_on_all_ranks(odd, name):
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        with pytest.raises(ReplicasDiffer) as caught:
            check_batch(odd if rank == 2 else {"a": torch.zeros(2)}, mesh)
        return caught.value.parameter, caught.value.ranks

    assert run_ranks(4, body) == [(name, ((0, 1, 3), (2,)))] * 4
