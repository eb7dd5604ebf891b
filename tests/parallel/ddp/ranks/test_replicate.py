"""`replicate`: data parallelism in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dure._composable import replicate
from dure._composable.fsdp import FSDPModule  # pyright: ignore
from dure._composable.replicate import DDP  # pyright: ignore
from dure.errors import ModuleError, UsageError
from dure.fsdp import fully_shard, strategy
from dure.testing import CommRecorder, run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import Net, batch, by_step, compare, loss_of, made, mine
from tests.thread_ranks import on_ranks


def test_training_equals_one_rank() -> None:
    def prepare(model: Net) -> None:
        before = list(model.state_dict())
        assert replicate(model, find_unused_parameters=True) is model
        assert list(model.state_dict()) == before
        assert type(model).__name__ == "DDPNet"
        assert isinstance(model, Net) and isinstance(model, DDP)

    compare("shared", 3, prepare=prepare)


def test_gradients_are_added_up_without_sync() -> None:
    def step(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        losses = []
        for k in range(2):
            if isinstance(model, DDP):
                model.set_requires_gradient_sync(k == 1)
            with CommRecorder() as seen:
                loss = loss_of(model, mine(batch(number + 10 * k), size, rank))
                loss.backward()
            if isinstance(model, DDP) and k == 0:
                assert "all_reduce" not in seen.ops
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    compare(
        "shared",
        2,
        prepare=lambda m: replicate(m, find_unused_parameters=True),
        step=step,
        expected_step=step,
    )


@pytest.mark.parametrize("way", ["gathered", "shared"])
def test_sharded_blocks_in_a_replicated_module(way: str) -> None:
    def prepare(model: Net) -> None:
        with strategy(way):
            for block in model.blocks:
                fully_shard(block)
        replicate(model, find_unused_parameters=True)
        assert isinstance(model.blocks[0], FSDPModule)

    compare(way, 2, prepare=prepare)


def test_ignored_modules_keep_their_own_gradients() -> None:
    def body(rank: int) -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        replicate(model, ignored_modules=[model[0]], device_id=torch.device("cpu"))
        model(torch.full((1, 2), float(rank))).sum().backward()
        return model[0].weight.grad, model[1].weight.grad

    first, second = run_ranks(2, body)
    assert first[0].tolist() == [[0.0, 0.0]] * 2
    assert second[0].tolist() == [[2.0, 2.0]] * 2
    # The output of the first layer is 1 on rank 0, and 3 on rank 1.
    assert first[1].tolist() == second[1].tolist() == [[2.0, 2.0]] * 2


def test_a_hook_reduces() -> None:
    calls: list[str] = []

    def body(rank: int) -> None:
        model: Any = replicate(nn.Linear(2, 2))

        def hook(state: Any, bucket: Any) -> Any:
            calls.append(state)
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook("state", hook)
        model(torch.ones(1, 2)).sum().backward()

    run_ranks(2, body)
    assert calls == ["state", "state"]


@on_ranks(2)
def test_what_is_refused(rank: int) -> None:
    model = replicate(nn.Linear(2, 2))
    with pytest.raises(ModuleError, match="already"):
        replicate(model)
    with pytest.raises(ModuleError, match="already"):
        fully_shard(model)
    with pytest.raises(ModuleError, match="cannot be copied"):
        copy.deepcopy(model)
    sharded = nn.Linear(2, 2)
    fully_shard(sharded)
    with pytest.raises(ModuleError, match="already"):
        replicate(sharded)
    with pytest.raises(UsageError, match="mixed_precision"):
        replicate(nn.Linear(2, 2), mixed_precision=object())


@on_ranks(2)
def test_a_forward_that_raises_leaves_nothing_behind(rank: int) -> None:
    model = made()
    replicate(model, find_unused_parameters=True)
    with pytest.raises(IndexError):
        model(torch.tensor([99]))
    by_step(model, 0, 2, rank)
