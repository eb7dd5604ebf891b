"""Fully sharded training with real processes: as one rank, and when one is killed."""

from __future__ import annotations

import pytest

from dure.native import available as native_available
from procs import fsdp_ranks
from procs.shm_ranks import Ranks

NEEDS_ENGINE = pytest.mark.skipif(
    not native_available()[0], reason=native_available()[1] or "no engine"
)


@NEEDS_ENGINE
@pytest.mark.parametrize("way", ["shared", "gathered"])
@pytest.mark.parametrize("n", [2, 3])
def test_training_over_shared_memory_equals_one_rank(process_pool, n, way):
    for _, far in process_pool(n, "shm").run(fsdp_ranks.trains_as_one, n, way):
        assert far < 1e-12


@NEEDS_ENGINE
@pytest.mark.parametrize("way", ["shared", "gathered"])
def test_two_runs_give_the_same_bits_2_ranks(process_pool, way):
    pool = process_pool(2, "shm")
    first, second = (pool.run(fsdp_ranks.trains_as_one, 2, way) for _ in range(2))
    assert first == second


@NEEDS_ENGINE
@pytest.mark.parametrize("way", ["shared", "gathered"])
def test_replicas_of_shards_4_ranks(process_pool, way):
    for _, far in process_pool(4, "shm").run(fsdp_ranks.trains_as_one, 4, way, 2):
        assert far < 1e-12


def test_training_over_gloo_equals_one_rank_2_ranks(process_pool):
    for _, far in process_pool(2, "gloo").run(fsdp_ranks.trains_as_one, 2, "gathered"):
        assert far < 1e-12


@NEEDS_ENGINE
@pytest.mark.parametrize("way", ["shared", "gathered"])
@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
def test_survivors_of_a_death_are_told_what_it_left(tmp_path, way, phase):
    with Ranks(2, tmp_path, fsdp_ranks.loses_one, way, phase) as ranks:
        result = ranks.result(0)
        if isinstance(result, BaseException):
            raise result
        kind, notes = result
        assert ranks.result(1) is None
    assert kind == "PeerLost"
    if way == "shared":
        assert any(("not whole" if phase == "step" else "are whole") in note for note in notes)


@NEEDS_ENGINE
@pytest.mark.parametrize("way", ["shared", "gathered"])
def test_what_is_offloaded_is_no_longer_resident_2_ranks(process_pool, tmp_path, way):
    results = process_pool(2, "shm").run(fsdp_ranks.gives_memory_back, way, str(tmp_path))
    for (training, offloaded, back), is_same in results:
        assert is_same
        assert training > 45  # of 96 MB a rank has half, and what both share
        assert offloaded < 0.2 * training
        assert back - offloaded > 0.8 * 45
