"""DistributedSampler: torch's order, and where it goes on; `test_loader_resumed` counts samples."""

import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler as TorchSampler
from torch.utils.data import SequentialSampler, TensorDataset

from dure.data import DistributedSampler
from dure.errors import UsageError


@given(
    length=st.integers(0, 60),
    ranks=st.integers(1, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 5),
)
def test_sampler_gives_the_order_of_torch(length, ranks, shuffle, drop_last, seed, epoch):
    options = {"num_replicas": ranks, "shuffle": shuffle, "drop_last": drop_last, "seed": seed}
    for rank in range(ranks):
        ours = DistributedSampler(range(length), rank=rank, **options)
        theirs = TorchSampler(TensorDataset(torch.arange(length)), rank=rank, **options)
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)
        assert (ours.num_samples, ours.total_size) == (theirs.num_samples, theirs.total_size)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_rank_holds_its_share_of_the_order_only(shuffle):
    """The permutation itself is torch's memory, which is not counted here."""
    samples: Any = range(100_000)
    sampler = DistributedSampler(samples, 100, 3, shuffle=shuffle)
    tracemalloc.start()
    seen = list(sampler)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen == list(TorchSampler(samples, 100, 3, shuffle=shuffle))
    assert peak < 100 * 1000  # bytes: 1,000 numbers in two lists; all 100,000 take 3.6 MB


def test_sampler_resumes_only_the_first_pass():
    sampler = DistributedSampler(range(10), 1, 0, shuffle=False)
    sampler.load_state_dict(
        DistributedSampler(range(10), 1, 0, shuffle=False).state_dict(consumed=7)
    )
    assert len(sampler) == 3
    assert list(sampler) == [7, 8, 9]
    assert len(sampler) == 10
    assert list(sampler) == list(range(10))


def test_sampler_new_epoch_forgets_the_position_and_same_epoch_keeps_it():
    saved = DistributedSampler(range(10), 2, 0)
    saved.set_epoch(4)
    state = saved.state_dict(consumed=6)
    sampler = DistributedSampler(range(10), 2, 0)
    sampler.load_state_dict(state)
    sampler.set_epoch(4)
    assert len(list(sampler)) == 2
    sampler.set_epoch(5)
    assert len(list(sampler)) == 5


@pytest.mark.parametrize(
    "change",
    [
        *({"seed": 1}, {"shuffle": False}, {"length": 11}, {"epoch": None}, {"consumed": -1}),
        {"version": 2},
    ],
)
def test_sampler_state_of_another_order_is_refused(change):
    state = {**DistributedSampler(range(10), 1, 0).state_dict(), **change}
    state = {k: v for k, v in state.items() if v is not None}
    with pytest.raises(UsageError):
        DistributedSampler(range(10), 1, 0).load_state_dict(state)
    with pytest.raises(UsageError):
        DistributedSampler(range(10), 1, 0).state_dict(consumed=-1)


@pytest.mark.parametrize(("ranks", "rank"), [(2, 2), (2, -1), (0, 0), (-1, 0)])
def test_sampler_rank_outside_its_replicas_is_refused(ranks, rank):
    with pytest.raises(UsageError):
        DistributedSampler(SequentialSampler(range(10)), ranks, rank)


def test_state_has_the_keys_that_older_checkpoints_have() -> None:
    # A state is the template that a checkpoint is loaded into: a new key would be missing in it.
    keys = {"epoch", "consumed", "seed", "shuffle", "length"}
    assert DistributedSampler(range(8), 2, 0).state_dict().keys() == keys
