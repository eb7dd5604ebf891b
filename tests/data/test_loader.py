"""DataLoader: delivered batches are what counts, and a sample's augmentation is its own."""

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
    TensorDataset,
)
from torch.utils.data import DistributedSampler as TorchSampler

from dure.data import DataLoader, DistributedSampler
from dure.errors import UsageError
from tests.data.loaders import Grouped, Noisy, check_resumed, loader_of, noise_of, same, taken


@pytest.mark.parametrize("kind", [Noisy, Grouped])
def test_loader_resumed_delivers_what_the_undisturbed_one_does(kind):
    check_resumed(kind, {}, {})


def test_sample_is_augmented_alike_whatever_the_world_and_the_batch_are():
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
    taken(loader_of(Noisy(12)), 0, 99)
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == expected


def test_loader_without_batches_gives_samples():
    loader = loader_of(Noisy(6), 2, 1, batch_size=None)
    assert [s.shape for s in taken(loader, 0, 99)] == [(4,)] * 3
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
    whole = taken(DataLoader(data, **make(data)), 2, 99)
    first = DataLoader(data, **make(data))
    begun = taken(first, 2, 2)
    second = DataLoader(data, **make(data))
    second.load_state_dict(first.state_dict())
    assert len(second) == len(whole) - 2
    assert same(begun + taken(second, 2, 99), whole)


class Lengths(BatchSampler):
    """A batch sampler of a user's own."""


FOREIGN = {
    "sampler": lambda n, length, seed: {
        "sampler": TorchSampler(Noisy(length), n, 0, seed=seed),
        "batch_size": 2,
    },
    "batch sampler": lambda n, length, seed: {
        "batch_sampler": Lengths(DistributedSampler(range(length), n, 0, seed=seed), 2, False)
    },
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize(
    ("other", "named"), [((4, 24, 1), "num_replicas"), ((2, 25, 1), "length"), ((2, 24, 5), "seed")]
)
def test_a_skipped_order_is_not_resumed_as_another_order(kind, other, named):
    first = DataLoader(Noisy(24), **FOREIGN[kind](2, 24, 1))
    taken(first, 1, 2)
    second = DataLoader(Noisy(other[1]), **FOREIGN[kind](*other))
    before = second.state_dict()
    with pytest.raises(UsageError) as caught:
        second.load_state_dict(first.state_dict())
    assert named in caught.value.seen
    with pytest.raises(UsageError, match="newer release"):
        second.load_state_dict(before | {"version": 2})
    assert second.state_dict() == before


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
        loader_of(Noisy(5)).load_state_dict(state)
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
    second = DistributedSampler(range(10), 2, 1)
    assert list(second) == list(second)  # rank 0 alone warns


@pytest.mark.parametrize("kind", [DistributedSampler, TorchSampler])
def test_an_epoch_that_is_set_on_the_sampler_counts_2_ranks(kind):
    def made():
        sampler = kind(Noisy(20), 2, 0, seed=5)
        return sampler, DataLoader(Noisy(20), 2, sampler=sampler)

    sampler, loader = made()
    first = torch.cat(list(loader))
    sampler.set_epoch(1)
    assert loader.epoch == 1
    before = loader.state_dict()
    batches = list(loader)
    seen = dict(zip(first[:, 0].tolist(), first[:, 1].tolist(), strict=True))
    assert all(seen.get(i) != noise for i, noise, *_ in torch.cat(batches).tolist())
    _, other = made()
    other.load_state_dict(before)  # nothing of epoch 1 was delivered then
    assert torch.equal(torch.cat(list(other)), torch.cat(batches))


def test_a_subset_is_augmented_by_sample():
    dataset: Any = Noisy(12)
    subset = Subset(Subset(dataset, range(2, 12)), range(1, 9))
    four, three = (torch.cat(list(DataLoader(subset, size))) for size in (4, 3))
    assert torch.equal(four, three)


class NoisySubset(Subset[Any]):
    """A part of a dataset whose samples it augments itself."""

    def __getitem__(self, index: Any) -> float:
        return torch.rand(()).item()

    def __getitems__(self, indices: list[int]) -> list[float]:
        return [self[index] for index in indices]


def test_a_subset_that_draws_is_augmented_by_sample_whatever_is_inside():
    inside: Any = list(range(8))
    subset = NoisySubset(inside, range(8))
    four, three = (torch.cat(list(DataLoader(subset, size))) for size in (4, 3))
    assert torch.equal(four, three)
    assert len(set(four.tolist())) == 8


def with_noise(samples: list[int]) -> torch.Tensor:
    return torch.tensor([*samples, random.random(), np.random.rand(), torch.rand(()).item()])


TWELVE: Any = list(range(12))


@pytest.mark.parametrize("data", [TWELVE, Subset(TWELVE, range(12))])
def test_a_collate_function_that_draws_is_resumed_with_workers(data):
    def loader():
        return DataLoader(data, 4, collate_fn=with_noise, num_workers=1)

    whole, first, second = loader(), loader(), loader()
    undisturbed = list(whole)
    begun = [next(iter(first))]
    second.load_state_dict(first.state_dict())
    assert same(begun + list(second), undisturbed)
    assert [batch[:4].tolist() for batch in undisturbed] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_no_generator_is_touched_for_samples_that_draw_nothing(monkeypatch):
    seeded: list[int] = []
    monkeypatch.setattr(random, "seed", seeded.append)
    data: Any = [[1.0], [2.0], [3.0]]
    for dataset in (data, torch.tensor(data), TensorDataset(torch.tensor(data)), Subset(data, [0])):
        assert len(list(DataLoader(dataset, 2))) == (1 if isinstance(dataset, Subset) else 2)
    assert not seeded


PLACES = {
    "sampler": lambda: DistributedSampler(range(24), 2, 0),
    "loader": lambda: loader_of(Noisy(24)),
    "loader of another sampler": lambda: DataLoader(Noisy(24), **FOREIGN["sampler"](2, 24, 1)),
}


def walked(place, at, act, into=None):
    """Return what a pass gives, at whose `at`-th item something is done."""
    seen = [] if into is None else into
    for number, item in enumerate(place):
        seen.append(torch.as_tensor(item))
        if number == at:
            act()
    return seen


@pytest.mark.parametrize("kind", PLACES)
def test_a_pass_does_not_go_on_after_a_load_within_it(kind):
    undisturbed = walked(PLACES[kind](), 0, int)
    place: Any = PLACES[kind]()
    for _ in zip(range(2), place, strict=False):
        pass
    saved = place.state_dict()
    for at in range(2):
        seen: list[Any] = []
        with pytest.raises(UsageError) as caught:
            walked(place, at, lambda: place.load_state_dict(saved), seen)
        assert caught.value.seen.startswith("load_state_dict") and len(seen) == at + 1
        assert place.state_dict() == saved
    rest = iter(place)
    assert torch.equal(torch.as_tensor(next(rest)), undisturbed[2])
    again: Any = PLACES[kind]()
    again.load_state_dict(place.state_dict())
    assert same([*map(torch.as_tensor, again)], undisturbed[3:])


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_load_at_the_last_item_of_a_pass_is_not_taken_for_its_end(kind, epoch):
    place: Any = PLACES[kind]()
    place.set_epoch(epoch)
    saved = place.state_dict()
    place.set_epoch(1)
    with pytest.raises(UsageError):
        walked(place, len(place) - 1, lambda: place.load_state_dict(saved))
    assert place.state_dict() == saved
