"""Loaders of samples that are augmented at random, and what must hold of them with any workers."""

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from dure.data import DataLoader, DistributedSampler


class Noisy(Dataset[Any]):
    """Samples that are augmented with all three generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = (random.random(), np.random.rand(), torch.rand(()).item())
        return torch.tensor([index, *noise], dtype=torch.float64)


class Grouped(Noisy):
    """The same, fetched a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[i] for i in indices]


def loader_of(dataset, ranks=2, rank=0, batch_size: int | None = 3, **options):
    sampler = DistributedSampler(dataset, ranks, rank, seed=5, pad=options.pop("pad", True))
    return DataLoader(dataset, batch_size, sampler=sampler, **options)


def taken(loader, epoch, steps):
    loader.set_epoch(epoch)
    return [batch for _, batch in zip(range(steps), loader, strict=False)]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_resumed(kind: Any, first_options: Any, second_options: Any) -> None:
    """A loader that goes on delivers what one that was never disturbed does."""
    whole = loader_of(kind(40), **first_options)
    undisturbed = [taken(whole, epoch, 100) for epoch in range(2)]
    first = loader_of(kind(40), **first_options)
    taken(first, 0, 100)
    begun = taken(first, 1, 2)
    second = loader_of(kind(40), **second_options)
    second.load_state_dict(first.state_dict())
    assert (second.epoch, len(second)) == (1, len(whole) - 2)
    assert same(begun + taken(second, 1, 100), undisturbed[1])
    assert not same(undisturbed[0], undisturbed[1])
    assert len(second) == len(whole) == 7


def noise_of(**options: Any) -> dict[int, list[float]]:
    """Return how each sample was augmented."""
    loader = loader_of(Noisy(12), **options)
    return {int(s[0]): s[1:].tolist() for batch in taken(loader, 3, 99) for s in batch}
