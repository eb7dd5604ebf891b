"""What tests of fully sharded training share: a model, and training it against one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dure.fsdp import fully_shard, strategy
from dure.tensor import DTensor
from dure.testing import run_ranks

STEPS = 3
ROWS = 12
M = TypeVar("M", bound=nn.Module)
Tensors = dict[str, torch.Tensor | None]
BOTH_WAYS = pytest.mark.parametrize("way", ["gathered", "shared"])
"""Each strategy of `fully_shard`."""
making = threading.Lock()  # of models: ranks that are threads share a random generator


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 7), nn.Linear(7, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an embedding and a head, which may have one weight."""

    def __init__(self, tied: bool = False, how: str = "plain") -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(6, 11, bias=False)
        self.unused = nn.Linear(3, 5)
        self.how = how
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.how == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.head(x)


def made(kind: Callable[..., Net] = Net, **options: Any) -> Net:
    with making:
        torch.manual_seed(1)
        return kind(**options).double()


def filled(model: M) -> M:
    """Give parameters values, each its own."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + number)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    drawn = torch.randint(11, (2, ROWS), generator=generator)
    return drawn[0], drawn[1]


def loss_of(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1])


def mine(data: tuple[torch.Tensor, torch.Tensor], size: int, rank: int) -> Any:
    return tuple(t.chunk(size)[rank] for t in data)


def trained(
    model: nn.Module,
    step_loss: Callable[[nn.Module, int], torch.Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    before_step: Callable[[nn.Module], object] | None = None,
) -> list[torch.Tensor]:
    """Train some steps; return the losses."""
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = step_loss(model, step)
        if before_step is not None:
            before_step(model)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


assert_same = torch.testing.assert_close  # also of dicts in which there is None


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    return None if tensor is None else tensor.detach()


def full_weights(model: nn.Module) -> Tensors:
    return {name: whole(p) for name, p in model.named_parameters()}


def full_gradients(model: nn.Module) -> Tensors:
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def by_step(model: nn.Module, step: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    loss = loss_of(model, mine(batch(step), size, rank))
    loss.backward()
    return loss


def accumulate(model: Any, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    """Add the gradients of three backwards, of which the last reduces."""
    losses = []
    for k in range(3):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(k == 2)
        loss = loss_of(model, mine(batch(number + 10 * k), size, rank)) / 3
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def shard(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def sharded(way: str, model: Net | None = None, **options: Any) -> Any:
    """Return a model that is sharded by a strategy."""
    with strategy(way):
        return shard(made() if model is None else model, **options)


def by_parts(way: str, model: nn.Module, *parts: Any, **options: Any) -> Any:
    """Shard parts of a model, each by a call of its own, and then the model."""
    with strategy(way):
        for part in parts:
            fully_shard(part, **options)
        return fully_shard(model, **options)


def expected_gradients(step: int = 0) -> Tensors:
    """Return the gradients of a step on one rank."""
    model = made()
    by_step(model, step)
    return full_gradients(model)


def expected_weights() -> Tensors:
    """Return the weights after training on one rank."""
    model = made()
    trained(model, by_step, adamw)
    return full_weights(model)


def compare(
    way: str,
    size: int = 2,
    prepare: Callable[[Net], object] = shard,
    step: Callable[[nn.Module, int, int, int], torch.Tensor] = by_step,
    expected_step: Callable[[nn.Module, int], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    before_step: Callable[[nn.Module], object] | None = None,
    make: Callable[[], Any] = made,
    data_ranks: Callable[[int], tuple[int, int]] | None = None,
) -> None:
    """Compare training on `size` ranks with that on one: losses, last gradients, weights."""
    reference = make()
    losses = trained(reference, expected_step or by_step, optimizer, before_step)

    def body(rank: int) -> Any:
        model = make()
        with strategy(way):
            prepare(model)
        at = (size, rank) if data_ranks is None else data_ranks(rank)
        found = trained(model, lambda m, s: step(m, s, *at), optimizer, before_step)
        return found, full_gradients(model), full_weights(model)

    results = run_ranks(size, body)
    mean = torch.stack([torch.stack(r[0]) for r in results]).mean(0)
    torch.testing.assert_close(mean, torch.stack(losses))
    for _, gradients, weights in results:
        assert_same(weights, full_weights(reference))
        assert_same(gradients, full_gradients(reference))
