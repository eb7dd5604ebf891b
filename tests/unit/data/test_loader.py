"""DataLoader: delivered batches are what counts, and a sample's augmentation is its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data import DistributedSampler as TorchSampler

from dure.data import DataLoader, DistributedSampler
from dure.errors import UsageError

WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Noisy:
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


def _loader(dataset, ranks=2, rank=0, batch_size: int | None = 3, **options):
    sampler = DistributedSampler(dataset, ranks, rank, seed=5, pad=options.pop("pad", True))
    return DataLoader(dataset, batch_size, sampler=sampler, **options)


def _taken(loader, epoch, steps):
    loader.set_epoch(epoch)
    return [batch for _, batch in zip(range(steps), loader, strict=False)]


def _same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@WORKERS
@pytest.mark.parametrize("kind", [Noisy, Grouped])
def test_loader_resumed_delivers_what_the_undisturbed_one_does(workers, kind):
    options = {"num_workers": workers}
    if workers:
        options |= {"prefetch_factor": 4, "persistent_workers": True}
    whole = _loader(kind(40), **options)
    undisturbed = [_taken(whole, epoch, 100) for epoch in range(2)]
    first = _loader(kind(40), **options)
    _taken(first, 0, 100)
    begun = _taken(first, 1, 2)
    second = _loader(kind(40), **(options if workers == 0 else options | {"num_workers": 1}))
    second.load_state_dict(first.state_dict())
    assert (second.epoch, len(second)) == (1, len(whole) - 2)
    assert _same(begun + _taken(second, 1, 100), undisturbed[1])
    assert not _same(undisturbed[0], undisturbed[1])
    assert len(second) == len(whole) == 7


def test_loader_counts_what_was_delivered_and_not_what_was_read_ahead():
    loader = _loader(Noisy(60), num_workers=1, prefetch_factor=8)
    _taken(loader, 0, 2)
    assert loader.state_dict()["sampler"]["consumed"] == 2 * 3 * 2
    assert loader.sampler.state_dict()["consumed"] > 2 * 3 * 2
    assert len(loader) == 10


@WORKERS
def test_sample_is_augmented_alike_whatever_the_world_batch_and_workers_are(workers):
    def noise_of(**options):
        loader = _loader(Noisy(12), num_workers=workers, **options)
        return {int(s[0]): s[1:].tolist() for batch in _taken(loader, 3, 99) for s in batch}

    alone = noise_of(ranks=1, batch_size=12)
    assert len({tuple(noise) for noise in alone.values()}) == 12
    shared = noise_of(ranks=2, rank=0, batch_size=2) | noise_of(ranks=2, rank=1, batch_size=2)
    assert shared == alone


def test_loader_leaves_the_generators_of_training_alone():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = torch.rand(2).tolist(), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    _taken(_loader(Noisy(12)), 0, 99)
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == expected


def test_loader_alone_takes_the_whole_dataset():
    loader = DataLoader(Noisy(7), batch_size=2, shuffle=True, drop_last=True)
    assert (len(loader), loader.batch_size, loader.num_workers) == (3, 2, 0)
    assert [batch.shape for batch in loader] == [(2, 4)] * 3


@pytest.mark.parametrize("length", [11, 12, 13, 14])
def test_loader_that_does_not_pad_gives_ranks_one_batch_more_or_less(length):
    loaders = [_loader(Noisy(length), 3, r, 2, pad=False) for r in range(3)]
    batches = [_taken(loader, 0, 99) for loader in loaders]
    assert [len(loader) for loader in loaders] == [len(b) for b in batches]
    seen = sorted(int(s[0]) for part in batches for batch in part for s in batch)
    assert seen == list(range(length))
    assert len(batches[0]) - len(batches[-1]) in (0, 1)


def test_loader_without_batches_gives_samples():
    loader = _loader(Noisy(6), 2, 1, batch_size=None)
    assert [s.shape for s in _taken(loader, 0, 99)] == [(4,)] * 3
    assert len(loader) == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda data: {"sampler": TorchSampler(data, 2, 1, seed=3), "batch_size": 2},
        lambda data: {"sampler": SequentialSampler(data), "batch_size": 2},
        lambda data: {"batch_sampler": [[3, 1], [2], [0, 5, 4], [6]]},
    ],
)
def test_loader_with_another_sampler_skips_to_where_it_was(make):
    data = Noisy(9)
    whole = _taken(DataLoader(data, **make(data)), 2, 99)
    first = DataLoader(data, **make(data))
    begun = _taken(first, 2, 2)
    second = DataLoader(data, **make(data))
    second.load_state_dict(first.state_dict())
    assert len(second) == len(whole) - 2
    assert _same(begun + _taken(second, 2, 99), whole)


class Stream(IterableDataset):
    """A dataset without indices."""

    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Stream()),
        lambda: DataLoader(Noisy(3), sampler=RandomSampler(range(3))),
        lambda: DataLoader(Noisy(3), shuffle=True, sampler=SequentialSampler(range(3))),
        lambda: DataLoader(
            Noisy(3), 2, batch_sampler=BatchSampler(SequentialSampler(range(3)), 2, False)
        ),
    ],
)
def test_loader_that_could_not_resume_is_refused(make):
    with pytest.raises(UsageError):
        make()


@pytest.mark.parametrize("state", [{}, {"sampler": {"epoch": 1}}])
def test_loader_refuses_the_state_of_another_kind(state):
    with pytest.raises(UsageError):
        _loader(Noisy(5)).load_state_dict(state)
    with pytest.raises(UsageError):
        DataLoader(Noisy(4), sampler=SequentialSampler(range(4))).load_state_dict(state)


def test_forgotten_set_epoch_is_said_once():
    sampler = DistributedSampler(range(10), 1, 0)
    list(sampler)
    with pytest.warns(UserWarning, match="set_epoch"):
        again = list(sampler)
    assert again == list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != again


@pytest.mark.parametrize("kind", [DistributedSampler, TorchSampler])
def test_an_epoch_that_is_set_on_the_sampler_counts_2_ranks(kind):
    def loader_of():
        sampler = kind(Noisy(20), 2, 0, seed=5)
        return sampler, DataLoader(Noisy(20), 2, sampler=sampler)

    sampler, loader = loader_of()
    first = torch.cat(list(loader))
    sampler.set_epoch(1)
    assert loader.epoch == 1
    before = loader.state_dict()
    batches = list(loader)
    seen = dict(zip(first[:, 0].tolist(), first[:, 1].tolist(), strict=True))
    assert all(seen.get(i) != noise for i, noise, *_ in torch.cat(batches).tolist())
    _, other = loader_of()
    other.load_state_dict(before)  # nothing of epoch 1 was delivered then
    assert torch.equal(torch.cat(list(other)), torch.cat(batches))


def test_a_subset_is_augmented_by_sample():
    dataset: Any = Noisy(12)
    subset = Subset(Subset(dataset, range(2, 12)), range(1, 9))
    four, three = (torch.cat(list(DataLoader(subset, size))) for size in (4, 3))
    assert torch.equal(four, three)
