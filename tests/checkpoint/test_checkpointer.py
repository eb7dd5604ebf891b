"""A Checkpointer alone: what comes back, what is refused and why, what is left in the folder."""

import gc
import random
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from dure.checkpoint import Checkpointer, PerRank, load
from dure.checkpoint.catalog import catalog_of
from dure.checkpoint.reading import faults
from dure.data import DistributedSampler
from dure.errors import CheckpointError, CheckpointMismatch, UsageError
from dure.testing import run_ranks
from tests.checkpoint.small_runs import equal, small, trained


def test_all_of_a_run_comes_back(tmp_path):
    saved, loaded = trained(1), trained(2)
    extra, other = {"curve": [0.5, float("inf")], 3: ("a", None)}, {"old": 1}
    curve, filled = [1.5, 2.5], [0.0]
    sampler, scaler = DistributedSampler(range(20), 2, 0), torch.amp.GradScaler("cpu")
    rest = {"place": sampler, "scaler": scaler}
    Checkpointer(tmp_path).save(12, **saved, **rest, extra=extra, curve=curve)
    draws = torch.rand(2).tolist(), random.random(), np.random.rand()
    step = Checkpointer(tmp_path).load(**loaded, **rest, extra=other, curve=filled)
    assert step == 12 and other == extra and filled == curve
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == draws
    for name, thing in saved.items():
        assert equal(thing.state_dict(), loaded[name].state_dict()), name
    assert list(tmp_path.iterdir()) == [tmp_path / "000001-step-12"]


def test_load_reads_what_a_checkpointer_has_saved(tmp_path):
    saved, loaded = trained(1), trained(2)
    path = Checkpointer(tmp_path).save(12, **saved, extra={3: ("a", torch.ones(1))})
    found = load(loaded, checkpoint_id=path)
    for name, thing in saved.items():
        assert equal(thing.state_dict(), loaded[name].state_dict()), name
    assert found.missing_keys == []
    assert {"extra.3.0", "extra.3.1", "(run).step"} < set(found.unexpected_keys)
    assert faults(path, catalog_of(path)) == []


def test_nothing_saved_is_nothing_loaded(tmp_path):
    checkpoints = Checkpointer(tmp_path / "absent")
    assert checkpoints.load(model=small()) is None
    assert checkpoints.latest() is None
    (tmp_path / "absent" / ".saving-000001-step-5").mkdir(parents=True)
    assert checkpoints.load(model=small()) is None


MISUSE = {
    "a number": lambda at: Checkpointer(at).save(1, thing=3),
    "no state": lambda at: Checkpointer(at).save(1, thing=object()),
    "no step": lambda at: Checkpointer(at).save(cast(Any, nn.ReLU())),
    "negative step": lambda at: Checkpointer(at).save(-1, model=small()),
    "unreadable name": lambda at: Checkpointer(at).save(1, a={"\ud800": torch.ones(2)}),
    "taken name": lambda at: Checkpointer(at).save(1, **{"(random)": PerRank({})}),
    "none kept": lambda at: Checkpointer(at, keep=0),
}


@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_is_refused_before_anything_is_written(tmp_path, misuse):
    with pytest.raises(UsageError):
        MISUSE[misuse](tmp_path)
    assert list(tmp_path.iterdir()) == []


def _filled(value):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


FAILURES = {
    "saved": lambda mine, _: mine.save(2, model=object()),
    "differs": lambda mine, rank: mine.save(2, model=_filled(rank)),
    "other object": lambda mine, _: mine.load(model=nn.Linear(3, 3)),
    "no such step": lambda mine, _: mine.load(7, model=small()),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failed_call_keeps_neither_the_lock_nor_the_next_checkpointer_from_saving(
    tmp_path, failure
):
    def body(rank):
        mine = Checkpointer(tmp_path)
        mine.save(1, state={})
        try:
            FAILURES[failure](mine, rank)
        except (CheckpointError, CheckpointMismatch, UsageError):
            return Checkpointer(tmp_path).save(3, state={}).name

    gc.disable()
    try:
        assert run_ranks(2, body) == ["000002-step-3"] * 2
        assert sorted(p.name for p in tmp_path.iterdir()) == ["000001-step-1", "000002-step-3"]
    finally:
        gc.enable()
