"""Shards, gradients and optimizer state in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import UsageError
from dure.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard, strategy
from dure.tensor import DTensor
from dure.testing import run_ranks
from ranks.fsdp_models import Net, adamw, by_step, compare, made, shard


@pytest.fixture(params=["gathered", "shared"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def file_of(tensor: torch.Tensor) -> str:
    """Return the path of the file that memory is mapped from, as the kernel tells it."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *name = line.split(maxsplit=5)
        begin, end = (int(x, 16) for x in span.split("-"))
        if begin <= address < end:
            return name[0] if name else ""
    raise AssertionError("no such memory")


def test_training_equals_one_rank(way: str, tmp_path: Path) -> None:
    def prepare(model: Net) -> None:
        shard(model, offload_policy=OffloadPolicy(path=tmp_path))

    compare(way, 3, prepare=prepare)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, foreach=True),
        torch.optim.Adagrad,
    ],
)
def test_all_that_stays_is_in_files(way: str, tmp_path: Path, make: Any) -> None:
    def body(rank: int) -> None:
        model = made()
        with strategy(way):
            shard(model, offload_policy=OffloadPolicy(path=tmp_path))
        optimizer = make(model.parameters())
        for step in range(2):
            by_step(model, step, 2, rank)
            for parameter in model.parameters():
                gradient: Any = parameter.grad
                if gradient is not None and gradient.part.numel():
                    assert str(tmp_path) in file_of(gradient.part)
            optimizer.step()
            optimizer.zero_grad()
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            if parameter.part.numel():
                assert str(tmp_path) in file_of(parameter.part)
        state = [v for s in optimizer.state.values() for v in s.values()]
        state = [v for v in state if isinstance(v, DTensor) and v.part.numel()]
        assert state
        for value in state:
            assert str(tmp_path) in file_of(value.part)

    run_ranks(2, body)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_state_comes_into_files_as_it_is_made(way: str, device: str, tmp_path: Path) -> None:
    """So that it never is in memory as a whole."""
    made_outside: list[torch.Tensor] = []

    def body(rank: int) -> None:
        model = nn.Linear(4, 4, device=device)
        with strategy(way):
            fully_shard(model, offload_policy=OffloadPolicy(path=tmp_path))
        if device == "meta":
            model.to_empty(device="cpu")
            for parameter in model.parameters():
                nn.init.ones_(parameter)
        optimizer = torch.optim.AdamW(model.parameters())

        init: Any = torch.optim.AdamW._init_group  # pyright: ignore

        def init_and_look(*args: Any, **kwargs: Any) -> Any:
            result = init(optimizer, *args, **kwargs)
            tensors = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
            assert len(tensors) == 4
            made_outside.extend(v for v in tensors if str(tmp_path) not in file_of(v.part))
            return result

        optimizer._init_group = init_and_look  # pyright: ignore
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    run_ranks(2, body)
    assert not made_outside


def test_loaded_state_goes_to_files(way: str, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model = made()
        with strategy(way):
            shard(model, offload_policy=OffloadPolicy(path=tmp_path))
        optimizer = adamw(model.parameters())
        by_step(model, 0, 2, rank)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        by_step(model, 1, 2, rank)
        optimizer.step()
        weight: Any = model.head.weight
        assert str(tmp_path) in file_of(optimizer.state[weight]["exp_avg"].part)

    run_ranks(2, body)


def test_low_precision_and_values_after_meta(way: str, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        with torch.device("meta"):
            model = nn.Linear(4, 6)
        with strategy(way):
            fully_shard(
                model,
                offload_policy=OffloadPolicy(path=tmp_path),
                mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            )
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        assert model(torch.ones(2, 4)).tolist() == [[2.5] * 6] * 2
        model.reshard()
        weight: Any = model.weight
        assert str(tmp_path) in file_of(weight.part)

    run_ranks(2, body)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        with pytest.raises(UsageError, match="no file can be made") as error:
            fully_shard(nn.Linear(2, 2), offload_policy=OffloadPolicy(path=tmp_path / "none"))
        assert str(tmp_path / "none") in str(error.value)

    run_ranks(2, body)
