"""Fully sharded training on n ranks against plain training on one: losses, gradients, weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dure.device_mesh import init_device_mesh
from dure.errors import MeshError, ModuleError, UsageError
from dure.fsdp import fully_shard, register_fsdp_forward_method
from dure.tensor import DTensor
from tests.parallel.fsdp.ranks.fsdp_models import (
    Net,
    accumulate,
    batch,
    by_parts,
    by_step,
    compare,
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


def tied_in_two_calls(model: Net) -> None:
    """Tied parameters go to the call around both modules."""
    fully_shard(model.embed)
    fully_shard(model.head)
    shard(model)
    assert model.embed.weight is model.head.weight


def embedding_not_in_backward(model: Net) -> None:
    fully_shard(model.embed)
    shard(model)
    model.embed.set_unshard_in_backward(False)


# ---------------------------------------------------------------- what a step is


def evaluate_before(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    with torch.no_grad():
        loss_of(model, mine(batch(number + 7), size, rank))
    assert all(isinstance(p, DTensor) for p in model.parameters()) or size == 1
    return by_step(model, number, size, rank)


class Skipping(Net):
    """Rank 1 does not call block 1 from the second step on: its gradient there is zero."""

    skip = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = x if self.skip and number == 1 else block(x)
        return self.head(x)


def skip_one(model: Any, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    model.skip = rank == 1 and number > 0
    return by_step(model, number, size, rank)


class Generator(Net):
    """Has a critic, which is a model by itself."""

    critics: list[Net]  # no module within


def made_generator() -> Net:
    model: Any = made(Generator)
    model.critics = [made()]
    return model


def with_critic(model: Any) -> None:
    shard(model)
    shard(model.critics[0])


def step_between(model: Any, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    """A step of the critic is between forward and backward of the other model."""
    (critic,) = model.critics
    tokens, targets = mine(batch(number), size, rank)
    out = model(tokens)
    critic.zero_grad()
    nn.functional.cross_entropy(critic(tokens) + out.detach(), targets).backward()
    torch.optim.SGD(critic.parameters(), lr=0.1).step()
    with torch.no_grad():
        criticized = critic(tokens)
    loss = nn.functional.cross_entropy(criticized + out, targets)
    loss.backward()
    return loss


class Adapted(Net):
    """With two low-rank adapters of the output, of which it uses the one that `side` names."""

    side = "left"

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(11, 2), nn.Linear(2, 11)) for _ in "lr")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = super().forward(tokens)
        return x + getattr(self, self.side)(x)


def step_adapters(model: Any, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    """The step of one adapter lies between forward and backward of the other."""
    losses = {}
    for model.side in ("left", "right"):
        losses[model.side] = loss_of(model, mine(batch(number), size, rank))
    for side, loss in losses.items():
        model.zero_grad()
        loss.backward()
        torch.optim.SGD(getattr(model, side).parameters(), lr=0.1).step()
    return torch.stack([loss.detach() for loss in losses.values()]).sum()


def skip_one_alone(model: Any, number: int) -> torch.Tensor:
    losses = []
    for rank in range(2):
        model.skip = rank == 1 and number > 0
        loss = loss_of(model, mine(batch(number), 2, rank)) / 2
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def optimizer(**form: Any) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.05, **form)


SCENARIOS: dict[str, dict[str, Any]] = {
    **{f"{size} ranks": {"size": size} for size in (1, 2, 3)},
    "root only": {"size": 3, "prepare": fully_shard},
    "lists of modules": {"prepare": lists_of_modules},
    "nested calls": {"prepare": nested_calls},
    **{
        f"reshard {kept}": {"prepare": partial(shard, reshard_after_forward=kept)}
        for kept in (False, 1)
    },
    "checkpoint, reentrant": {"make": partial(made, how="reentrant")},
    "checkpoint": {"make": partial(made, how="not")},
    "tied": {"make": partial(made, tied=True)},
    "tied in two calls": {"make": partial(made, tied=True), "prepare": tied_in_two_calls},
    "accumulation without sync": {"step": accumulate, "expected_step": accumulate},
    "evaluation before": {"step": evaluate_before},
    "clipping": {
        "size": 3,
        "before_step": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    },
    "foreach": {"optimizer": optimizer(foreach=True)},
    "fused": {"optimizer": optimizer(fused=True)},
    "single tensors": {"optimizer": optimizer(foreach=False)},
    "skipped module": {
        "make": partial(made, Skipping),
        "step": skip_one,
        "expected_step": skip_one_alone,
    },
    "another model": {
        "make": made_generator,
        "prepare": with_critic,
        "step": step_between,
        "expected_step": step_between,
    },
    "two adapters": {
        "make": partial(made, Adapted),
        "prepare": fully_shard,
        "step": step_adapters,
        "expected_step": step_adapters,
    },
    "embedding not in backward": {"prepare": embedding_not_in_backward},
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_training_equals_one_rank(way: str, name: str) -> None:
    compare(way, **SCENARIOS[name])


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
    by_parts(way, model, reshard_after_forward=False)
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
    wrong: Any
    for wrong in ({"mesh": "dp"}, {"mesh": mesh}, {"reshard_after_forward": 3}):
        with pytest.raises(MeshError):
            fully_shard(made(), **wrong)


# --------------------------------------------------------------------------------------------------
# Fully sharded training of what torch.compile has compiled.


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()  # pyright: ignore
    yield
    torch._dynamo.reset()  # pyright: ignore


def counting(graphs: list[Any]) -> Any:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def note(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=note, bw_compiler=note)


# The compiler looks at gradients of inner tensors; ranks that are threads undo its filter.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("way", "compiled"),
    [
        ("gathered", "block before"),
        ("shared", "block after"),
        ("shared", "forward"),
        ("gathered", "module around"),
    ],
)
def test_compiled_blocks_train_as_on_one_rank(way: str, compiled: str) -> None:
    """`block.compile()` before or after `fully_shard`; a compiled `forward`; a wrapped module."""
    graphs: list[Any] = []
    backend = counting(graphs)

    def make() -> Net:
        model = made()
        with making:  # the ranks are threads of one compiler
            for number, block in enumerate(model.blocks):
                around: Any = torch.compile(block, backend=backend)
                model.blocks[number] = around
        return model

    def prepare(model: Net) -> None:
        with making:
            for block in model.blocks:
                if compiled == "block before":
                    block.compile(backend=backend)
                elif compiled == "forward":
                    block.forward = torch.compile(block.forward, backend=backend)
        for block in model.blocks:
            fully_shard(block)
            if compiled == "block after":
                block.compile(backend=backend)
        fully_shard(model)

    compare(way, 2, prepare=prepare, make=make if compiled == "module around" else made)
    assert len(graphs) >= 4
