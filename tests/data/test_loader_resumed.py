"""The ledger: every rank writes down what it trained on; over an epoch, each sample once.

Jobs are made up: lengths, batch sizes, and any number of restarts with other numbers of ranks, each
after a step of its own. A restart hands on one rank's state, as a checkpoint does.
"""

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
def test_every_sample_is_seen_once_but_for_padding_and_a_dropped_tail(length, stints, last):
    stints = [*stints, last]
    assert _epoch(length, stints, pad=False) == Counter(range(length))
    padded = _epoch(length, stints)
    assert set(padded) == set(range(length))
    assert sum(padded.values()) - length < max(s.ranks for s in stints)
    dropped = _epoch(length, stints, drop_last=True)
    assert max(dropped.values(), default=1) == 1
    assert length - len(dropped) < max(s.ranks * s.batch for s in stints)


@pytest.mark.parametrize("how", [{"pad": False}, {}, {"drop_last": True}])
def test_next_epoch_after_a_resumed_one_is_whole(how):
    _, state = _incarnation(24, Stint(2, 3, 2), None, 4, **how)
    ledger, _ = _incarnation(24, Stint(3, 2, 99), state, 5, **how)
    assert Counter(ledger) == Counter(range(24))
