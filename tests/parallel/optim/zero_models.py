"""Models and training loops that the tests of the sharded optimizer share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dure as dist

WIDTH = 160
"""Its square is more than what is packed with others (flat_buffers.SMALL_BYTES)."""

KINDS = {
    "straight": {},
    "buckets": {"parameters_as_bucket_view": True},
    "shared": {"host_shared_parameters": True},
}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


class Net(nn.Module):
    """Large and small parameters, a tied one, and one in channels-last order."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # pyright: ignore
        self.up = nn.Linear(12, WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.mid.weight
        self.out = nn.Linear(WIDTH, 5)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.1, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(self.conv(x).flatten(1)))
        return self.out(self.tied(torch.relu(self.mid(y))))


def batch(generator: torch.Generator) -> torch.Tensor:
    """Return a batch, the same for all that have the same generator."""
    return torch.randn(4, 2, 3, 3, generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Make one step; return the loss."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups with different options."""
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    others = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    return [{"params": others}, {"params": biases, "lr": 0.003, "weight_decay": 0.0}]


Maker = Callable[[nn.Module], Any]


def pair(make: Maker, reference: Maker) -> tuple[Any, ...]:
    """Return (model, optimizer) and the same with the unsharded one."""
    model = Net()
    other = copy.deepcopy(model)
    return model, make(model), other, reference(other)


def same(a: object, b: object) -> bool:
    """Return whether two pytrees have the same structure and leaves, tensors bit by bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def equal(a: nn.Module, b: nn.Module) -> bool:
    """Return whether two modules have the same parameters, bit by bit."""
    return same(list(a.parameters()), list(b.parameters()))


def train_both(rank, optimizer, kind, grouped=True):
    """Train both on the same batches; return them and the optimizers."""
    cls, options = OPTIMIZERS[optimizer]
    params = groups_of if grouped else nn.Module.parameters
    model, ours, other, theirs = pair(
        lambda m: dist.ZeroRedundancyOptimizer(params(m), cls, **KINDS[kind], **options),
        lambda m: cls(params(m), **options),
    )
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (ours, theirs)]
    data = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = batch(data)
        assert step(model, ours, x) == step(other, theirs, x)
        for schedule in schedules:
            schedule.step()
    dist.barrier()
    assert equal(model, other)
    return model, ours, other, theirs
