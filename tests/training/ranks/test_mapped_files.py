"""Shards, gradients and optimizer state in files."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import UsageError
from dure.fsdp import OffloadPolicy, fully_shard, strategy
from dure.tensor import DTensor
from tests.parallel.fsdp.ranks.fsdp_models import BOTH_WAYS, adamw, by_step, compare, shard, sharded
from tests.thread_ranks import on_ranks

pytestmark = BOTH_WAYS


def file_of(tensor: torch.Tensor) -> str:
    """Return the path of the file that memory is mapped from, from the kernel's table."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *name = line.split(maxsplit=5)
        begin, end = (int(x, 16) for x in span.split("-"))
        if begin <= address < end:
            return name[0] if name else ""
    raise AssertionError("no such memory")


def test_training_equals_one_rank(way, tmp_path):
    compare(way, 3, prepare=partial(shard, offload_policy=OffloadPolicy(path=tmp_path)))
    assert not list(tmp_path.iterdir())


def parts_in(folder: Path, tensors: Iterable[Any]) -> list[bool]:
    """Tell of each shard that is not empty whether it is in a file of the folder."""
    shards = [t.part for t in tensors if isinstance(t, DTensor) and t.part.numel()]
    return [str(folder) in file_of(part) for part in shards]


OPTIMIZERS = {
    "adamw": adamw,
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_shards_gradients_and_state_are_in_files(rank, way, tmp_path, name):
    model = sharded(way, offload_policy=OffloadPolicy(path=tmp_path))
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(2):
        by_step(model, step, 2, rank)
        assert all(parts_in(tmp_path, (p.grad for p in model.parameters())))
        optimizer.step()
        optimizer.zero_grad()
    assert all(parts_in(tmp_path, model.parameters()))
    found = parts_in(tmp_path, (v for s in optimizer.state.values() for v in s.values()))
    assert found and all(found)


@on_ranks(2)
def test_a_folder_that_cannot_be_used_is_named(rank, way, tmp_path):
    policy = OffloadPolicy(path=tmp_path / "none")
    with strategy(way), pytest.raises(UsageError) as error:
        fully_shard(nn.Linear(2, 2), offload_policy=policy)
    assert str(tmp_path / "none") in str(error.value)
