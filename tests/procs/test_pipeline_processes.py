"""Pipelines with real processes: over shared memory, and when a rank is killed."""

from __future__ import annotations

import pytest
import torch

from dure.native import available as native_available
from dure.testing import run_ranks
from procs import pipeline_ranks
from procs.shm_ranks import Ranks

NEEDS_ENGINE = pytest.mark.skipif(
    not native_available()[0], reason=native_available()[1] or "no engine"
)


@NEEDS_ENGINE
def test_training_over_shared_memory_equals_one_process_2_ranks(process_pool):
    for far in process_pool(2, "shm").run(pipeline_ranks.trains_as_one):
        assert far < 1e-12


@NEEDS_ENGINE
def test_what_travels_through_slots_is_what_messages_bring_2_ranks(process_pool):
    found = process_pool(2, "shm").run(pipeline_ranks.hands_over)
    expected = run_ranks(2, pipeline_ranks.hands_over, backend="threads")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@NEEDS_ENGINE
def test_slots_are_used_again_2_ranks(process_pool):
    for counts, are_free in process_pool(2, "shm").run(pipeline_ranks.reuses_slots):
        assert are_free and counts[-1] <= 3, counts  # of 36 transfers


@NEEDS_ENGINE
def test_stages_whose_ranks_share_parameters_train_as_one_process_2_ranks(process_pool):
    for far in process_pool(2, "shm").run(pipeline_ranks.trains_shards_as_one):
        assert far < 1e-12


@NEEDS_ENGINE
@pytest.mark.parametrize(
    ("backend", "hosts", "actions"),
    [
        ("shm", "aa", {0: "0B2"}),
        ("hybrid", "abb", {0: "0B2", 2: "2"}),  # rank 2 may have done all that it has to
    ],
)
def test_survivors_of_a_death_name_their_action(backend, hosts, actions, tmp_path):
    with Ranks(len(hosts), tmp_path, pipeline_ranks.loses_one, backend, hosts) as ranks:
        assert ranks.result(1) is None
        for rank, begin in actions.items():
            result = ranks.result(rank)
            if isinstance(result, BaseException):
                raise result
            peer, action, text = result
            assert peer == 1 and action.startswith(begin) and action in text
