"""Whether each rank has a GPU of its own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from dure import torch_private
from dure.comm.gpus import each_has_its_own, visible_gpus
from dure.store.builds import Build
from dure.store.identity import myself
from dure.store.rendezvous import RendezvousMember


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch_private, "has_nccl", True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.parametrize(
    ("variable", "count", "device", "gpus"),
    [
        (None, 4, None, ("0", "1", "2", "3")),
        (None, 0, None, ()),
        ("2, 3", 2, None, ("2", "3")),
        ("", 0, None, ()),
        ("GPU-a,GPU-b", 2, "cuda:1", ("GPU-b",)),
        ("0,1,nosuch", 2, None, ("0", "1")),
        (None, 4, "cuda:1", ("1",)),
        (None, 4, "cuda", ("0",)),
        (None, 4, "cuda:7", ()),
        (None, 4, "cpu", ()),
    ],
)
def test_gpus_have_the_names_that_the_driver_knows(
    monkeypatch, four_gpus, variable, count, device, gpus
):
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert visible_gpus(None if device is None else torch.device(device)) == gpus


def test_a_torch_without_nccl_has_no_gpus(monkeypatch, four_gpus):
    monkeypatch.setattr(torch_private, "has_nccl", False)
    assert visible_gpus(None) == ()


@pytest.mark.parametrize(
    ("hosts", "gpus", "own"),
    [
        ("aa", ["0 1", "0 1"], True),
        ("aaa", ["0 1", "0 1", "0 1"], False),
        ("aabb", ["0 1", "0 1", "0 1", "0 1"], True),
        ("aabb", ["0 1", "0 1", "0", "0"], False),
        ("aa", ["0", "1"], True),  # each sees one: CUDA_VISIBLE_DEVICES, or device_id
        ("aa", ["0", "0"], False),
        ("ab", ["0", "0"], True),
        ("aa", ["0 1", ""], False),
    ],
)
def test_ranks_of_a_host_need_different_gpus(hosts, gpus, own):
    members: list[Any] = [
        RendezvousMember(rank, len(hosts), _process(host), "", Build(), tuple(names.split()))
        for rank, (host, names) in enumerate(zip(hosts, gpus, strict=True))
    ]
    assert each_has_its_own(members) == own


def _process(host: str) -> Any:
    return msgspec.structs.replace(myself(), host_id=host)
