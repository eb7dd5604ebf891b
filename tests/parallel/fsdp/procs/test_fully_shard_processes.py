"""Fully sharded training with real processes: as one rank, and when one is killed."""

from __future__ import annotations

import pytest
import torch

from tests.comm.forked_ranks import Ranks
from tests.parallel.fsdp.procs import fsdp_ranks
from tests.parallel.fsdp.ranks.fsdp_models import assert_same, expected_weights


@pytest.mark.parametrize(
    ("backend", "n", "way", "replicas"),
    [
        ("shm", 3, "shared", 1),
        ("shm", 4, "gathered", 2),
        ("gloo", 2, "gathered", 1),
    ],
)
def test_training_equals_one_rank_with_the_same_bits_each_time(
    process_pool, backend, n, way, replicas
):
    pool = process_pool(n, backend)
    first, second = (pool.run(fsdp_ranks.trains, n, way, replicas) for _ in range(2))
    for _, weights in first:
        assert_same(weights, expected_weights())
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.needs("engine")
@pytest.mark.parametrize(
    ("way", "phase", "note"),
    [
        ("shared", "forward", "are complete"),
        ("shared", "backward", "are complete"),
        ("shared", "step", "incomplete"),
        ("gathered", "backward", ""),
    ],
)
def test_survivors_of_a_death_learn_the_state_of_the_weights(tmp_path, way, phase, note):
    with Ranks(2, tmp_path, fsdp_ranks.loses_one, way, phase) as ranks:
        result = ranks.result(0)
        if isinstance(result, BaseException):
            raise result
        kind, notes = result
        assert ranks.result(1) is None
    assert kind == "PeerLost"
    assert note in " ".join(notes)
