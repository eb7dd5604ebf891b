"""The ledger: every rank writes down what it trained on; over an epoch, each sample once.

Jobs are made up: lengths, batch sizes, and any number of restarts with other numbers of ranks, each
after a step of its own. A restart hands on one rank's state, as a checkpoint does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.data import DataLoader, DistributedSampler


@dataclass(frozen=True)
class Stint:
    """What one incarnation of the job does: `steps` steps of `ranks` ranks."""

    ranks: int
    batch: int
    steps: int


STINTS = st.lists(
    st.builds(Stint, ranks=st.integers(1, 6), batch=st.integers(1, 4), steps=st.integers(0, 5)),
    max_size=6,
)
LAST = st.builds(Stint, ranks=st.integers(1, 6), batch=st.integers(1, 4), steps=st.just(10**6))


def _incarnation(length, stint, state, epoch, **how):
    """Run a stint in step; return what the ranks wrote down, and the state of rank 0."""
    loaders = [
        DataLoader(
            range(length),
            stint.batch,
            sampler=DistributedSampler(range(length), stint.ranks, rank, seed=11, **how),
            drop_last=how.get("drop_last", False),
        )
        for rank in range(stint.ranks)
    ]
    ledger, ended_at = [], []
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        loader.set_epoch(epoch)
        batches = 0
        for _, batch in zip(range(stint.steps), loader, strict=False):
            ledger += batch.tolist()
            batches += 1
        ended_at.append(batches)
    assert max(ended_at) - min(ended_at) <= (how.get("pad", True) is False)
    assert ended_at[0] == max(ended_at)  # rank 0 is never the one that runs out early
    return ledger, loaders[0].state_dict()


def _epoch(length, stints, **how):
    ledger, state = Counter(), None
    for stint in stints:
        seen, state = _incarnation(length, stint, state, epoch=4, **how)
        ledger.update(seen)
    return ledger


@settings(max_examples=60)
@given(length=st.integers(0, 90), stints=STINTS, last=LAST)
def test_every_sample_is_seen_exactly_once_without_padding(length, stints, last):
    assert _epoch(length, [*stints, last], pad=False) == Counter(range(length))


@settings(max_examples=60)
@given(length=st.integers(1, 90), stints=STINTS, last=LAST)
def test_every_sample_is_seen_and_only_the_padding_twice(length, stints, last):
    ledger = _epoch(length, [*stints, last])
    assert set(ledger) == set(range(length))
    assert sum(ledger.values()) - length < max(s.ranks for s in [*stints, last])


@settings(max_examples=60)
@given(length=st.integers(1, 90), stints=STINTS, last=LAST)
def test_no_sample_is_seen_twice_and_only_the_tail_not_at_all_when_dropping(length, stints, last):
    ledger = _epoch(length, [*stints, last], drop_last=True)
    assert max(ledger.values(), default=1) == 1
    assert length - len(ledger) < max(s.ranks * s.batch for s in [*stints, last])


@pytest.mark.parametrize("how", [{"pad": False}, {}, {"drop_last": True}])
def test_next_epoch_after_a_resumed_one_is_whole(how):
    _, state = _incarnation(24, Stint(2, 3, 2), None, 4, **how)
    ledger, _ = _incarnation(24, Stint(3, 2, 99), state, 5, **how)
    assert Counter(ledger) == Counter(range(24))
