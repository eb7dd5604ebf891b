"""Fully sharded training on n ranks against plain training on one: losses, gradients, weights."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dure.device_mesh import init_device_mesh
from dure.errors import MeshError, ModuleError, UsageError
from dure.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method, strategy
from dure.tensor import DTensor, Shard
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import (
    Net,
    assert_same,
    batch,
    by_step,
    compare,
    expected_gradients,
    full_gradients,
    loss_of,
    made,
    making,
    mine,
    shard,
    sharded,
)
from tests.thread_ranks import on_ranks

# ---------------------------------------------------------------- how a model is sharded


def lists_of_modules(model: Net) -> None:
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.blocks[2], model.head])
    fully_shard(model)


def nested_calls(model: Net) -> None:
    block: Any
    for block in model.blocks:
        fully_shard(block.up)
    shard(model)


def tied_in_two_calls(model: Net, first: str, second: str) -> None:
    """Tied parameters go to the call around both modules."""
    fully_shard(getattr(model, first))
    fully_shard(getattr(model, second))
    shard(model)
    assert model.embed.weight is model.head.weight


def by_last_dimension(model: Net) -> None:
    shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    assert str(model.head.weight.placements) == "(Shard(dim=1),)"


def embedding_not_in_backward(model: Net) -> None:
    fully_shard(model.embed)
    shard(model)
    model.embed.set_unshard_in_backward(False)


def partly_frozen() -> Net:
    model = made()
    for block in model.blocks:
        block.up.requires_grad_(False)
    model.embed.requires_grad_(False)
    return model


# ---------------------------------------------------------------- what a step is


def two_forwards(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    first, second = (loss_of(model, mine(batch(number + k), size, rank)) for k in (0, 10))
    loss = first + 2 * second
    loss.backward()
    return loss


def two_backwards(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    """The root's forward runs twice before the first backward."""
    first, second = (loss_of(model, mine(batch(number + k), size, rank)) for k in (0, 10))
    second.backward()
    first.backward()
    return first + second


def accumulate(
    sync: bool, model: nn.Module, number: int, size: int = 1, rank: int = 0
) -> torch.Tensor:
    losses = []
    for k in range(3):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(sync or k == 2)
        loss = loss_of(model, mine(batch(number + 10 * k), size, rank)) / 3
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def evaluate_before(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    with torch.no_grad():
        loss_of(model, mine(batch(number + 7), size, rank))
    assert all(isinstance(p, DTensor) for p in model.parameters()) or size == 1
    return by_step(model, number, size, rank)


def forward_before(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    """No backward follows the first forward, so the root keeps its unsharded parameters."""
    loss_of(model, mine(batch(number + 7), size, rank))
    return by_step(model, number, size, rank)


class Skipping(Net):
    """Rank 1 does not call block 1 from the second step on: its gradient there is zero."""

    skip = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = x if self.skip and number == 1 else block(x)
        return self.head(x)


def made_skipping() -> Net:
    with making:
        torch.manual_seed(1)
        return Skipping().double()


def skip_one(model: Any, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    model.skip = rank == 1 and number > 0
    return by_step(model, number, size, rank)


def skip_one_alone(model: Any, number: int) -> torch.Tensor:
    losses = []
    for rank in range(2):
        model.skip = rank == 1 and number > 0
        loss = loss_of(model, mine(batch(number), 2, rank)) / 2
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def same(step: Any, **more: Any) -> dict[str, Any]:
    """Return a scenario whose step is that of one rank as well."""
    return {"step": step, "expected_step": step, **more}


def optimizer(**form: Any) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.05, **form)


SCENARIOS: dict[str, dict[str, Any]] = {
    **{f"{size} ranks": {"size": size} for size in (1, 2, 3, 4)},
    "root only": {"size": 3, "prepare": fully_shard},
    "lists of modules": {"prepare": lists_of_modules},
    "nested calls": {"prepare": nested_calls},
    **{
        f"reshard {kept}": {"prepare": partial(shard, reshard_after_forward=kept)}
        for kept in (True, False, 1, 2)
    },
    "checkpoint, reentrant": {"make": partial(made, how="reentrant")},
    "checkpoint": {"make": partial(made, how="not")},
    "tied": {"make": partial(made, tied=True)},
    **{
        f"tied in calls, {names[0]} first": {
            "make": partial(made, tied=True),
            "prepare": partial(tied_in_two_calls, first=names[0], second=names[1]),
        }
        for names in (("embed", "head"), ("head", "embed"))
    },
    "frozen": {"make": partly_frozen},
    "two forwards": same(two_forwards),
    "two backwards": same(two_backwards),
    "accumulation": same(partial(accumulate, True)),
    "accumulation without sync": same(partial(accumulate, False)),
    "evaluation before": {"step": evaluate_before},
    "forward before": same(forward_before, prepare=fully_shard),
    "clipping": {
        "size": 3,
        "before_step": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    },
    "foreach": {"optimizer": optimizer(foreach=True)},
    "fused": {"optimizer": optimizer(fused=True)},
    "single tensors": {"optimizer": optimizer(foreach=False)},
    "skipped module": {
        "make": made_skipping,
        "step": skip_one,
        "expected_step": skip_one_alone,
    },
    "embedding not in backward": {"prepare": embedding_not_in_backward},
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_training_equals_one_rank(way: str, name: str) -> None:
    compare(way, **SCENARIOS[name])


def test_dimensions_chosen_by_the_user() -> None:
    compare("gathered", 4, prepare=by_last_dimension)


# ---------------------------------------------------------------- states of a model


@on_ranks(2)
def test_state_dictionaries_have_shards_under_the_users_names(rank: int, way: str) -> None:
    model, other = sharded(way), sharded(way)
    by_step(model, 0, 2, rank)
    state = model.state_dict()
    assert list(state) == list(made().state_dict())
    assert all(isinstance(v, DTensor) for v in state.values())
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    other.load_state_dict(model.state_dict())
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    other.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
    by_step(other, 1, 2, rank)


def test_a_forward_that_raises_leaves_the_model_sharded(way: str) -> None:
    def body(rank: int) -> Any:
        model = sharded(way)
        with pytest.raises(IndexError):
            model(torch.tensor([99]))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        by_step(model, 0, 2, rank)
        return full_gradients(model)

    for found in run_ranks(2, body):
        assert_same(found, expected_gradients())


@on_ranks(2)
def test_another_method_gathers_as_forward_does(rank: int, way: str) -> None:
    model: Any = made()
    expected = model.head(model.embed(torch.arange(4))).detach()
    model.__class__.peek = lambda self, t: self.head(self.embed(t))
    sharded(way, model)
    register_fsdp_forward_method(model, "peek")
    torch.testing.assert_close(model.peek(torch.arange(4)).detach(), expected)


@on_ranks(2)
def test_a_write_on_one_rank_is_seen_by_all(rank: int, way: str) -> None:
    """Parameters are unsharded; one rank changes its rows, and all ranks gather again."""

    model = nn.Linear(2, 4, bias=False)
    with strategy(way):
        fully_shard(model, reshard_after_forward=False)
    weight: Any = model.weight
    with torch.no_grad():
        weight.fill_(1.0)
        model(torch.ones(1, 2))
    assert model(torch.ones(1, 2)).tolist() == [[2.0] * 4]
    model.reshard()
    if way == "shared":
        model(torch.ones(1, 2)).sum().backward()
    else:
        model(torch.ones(1, 2))
    if rank == 1:
        with torch.no_grad():
            weight.to_local().fill_(3.0)
    assert model(torch.ones(1, 2)).tolist() == [[2.0, 2.0, 6.0, 6.0]]


@on_ranks(2)
def test_modules_change_their_shards_while_they_are_unsharded(rank: int, way: str) -> None:
    """`double()` after a forward that no backward followed."""

    model = made().float()
    with strategy(way):
        fully_shard(model)
    loss_of(model, batch(0))
    model.double()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert all(p.dtype == torch.float64 for p in model.parameters())
    by_step(model, 0, 2, rank)


def test_a_module_within_itself(way: str) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4, 4), 0.5))

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return x @ self.weight if depth == 0 else self(x, depth - 1) @ self.weight

    def gradients(model: nn.Module) -> Any:
        model(torch.ones(2, 4)).sum().backward()
        return full_gradients(model)

    def body(rank: int) -> Any:
        model = nn.Sequential(Nested())
        with strategy(way):
            fully_shard(model[0])
            return gradients(fully_shard(model))

    for found in run_ranks(2, body):
        assert_same(found, gradients(nn.Sequential(Nested())))


@on_ranks(2)
def test_misuse_is_refused(rank: int) -> None:
    model = made()
    with pytest.raises(ModuleError, match="no forward"):
        fully_shard(model.blocks)
    shard(model)
    with pytest.raises(ModuleError, match="data parallel already"):
        fully_shard(model)
    with pytest.raises(ModuleError, match="cannot be copied"):
        copy.deepcopy(model)
    odd = made()
    odd.head.weight = nn.Parameter(odd.head.weight.detach().t())
    with pytest.raises(ModuleError, match="contiguous"):
        fully_shard(odd)
    odd = made()
    odd.head.bias = nn.Parameter(torch.tensor(1.0))
    before = list(odd.parameters())
    with pytest.raises(ModuleError, match="without dimensions"):
        fully_shard(odd)
    assert all(a is b for a, b in zip(before, odd.parameters(), strict=True))
    with pytest.raises(UsageError):
        fully_shard([])
    mesh = init_device_mesh("cpu", (2, 1, 1))
    wrong: tuple[dict[str, Any], ...] = (
        {"mesh": "dp"},
        {"mesh": mesh},
        {"reshard_after_forward": 0},
        {"reshard_after_forward": 3},
    )
    for options in wrong:
        with pytest.raises(MeshError):
            fully_shard(made(), **options)
