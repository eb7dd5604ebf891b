"""The sharded optimizer with real processes: one memory for all, and every backend."""

from __future__ import annotations

from collections import Counter

import pytest

from dure.native import available as native_available
from dure.testing import ProcessPool
from procs import zero_ranks

NEEDS_ENGINE = pytest.mark.skipif(
    not native_available()[0], reason=native_available()[1] or "no engine"
)


@NEEDS_ENGINE
@pytest.mark.parametrize("n", [2, 3])
def test_parameters_are_one_memory_for_all_ranks(n, process_pool):
    pool = process_pool(n, "shm")
    seen = pool.run(zero_ranks.one_memory, n)
    (files,) = {frozenset(s["files"]) for s in seen}
    assert len(files) == 1 and "" not in files
    assert all(s == seen[0] for s in seen)
    for ddp_first in (True, False):
        owned = [o for o, _ in pool.run(zero_ranks.shared_training, n, ddp_first)]
        assert sum(owned) == 9 and min(owned) > 0


@NEEDS_ENGINE
def test_modules_behave_as_others_afterwards_2_ranks(process_pool):
    pool = process_pool(2, "shm")
    first, second = pool.run(zero_ranks.afterwards, 2)
    assert first == second
    assert "" not in first and first[0] != first[1]


@NEEDS_ENGINE
def test_each_rank_gives_back_its_own_copy_2_ranks(process_pool):
    for given_back, size in process_pool(2, "shm").run(zero_ranks.memory_given_back, 2):
        assert given_back > 0.9 * size


@NEEDS_ENGINE
def test_each_host_has_a_copy_and_all_of_the_state():
    with ProcessPool(3, "hybrid", hosts="aab") as pool:
        seen = pool.run(zero_ranks.over_hosts, 3)
    assert [s["host"] for s in seen] == [(0, 1), (0, 1), (2,)]
    assert seen[0]["files"] == seen[1]["files"] != seen[2]["files"]
    for host in ((0, 1), (2,)):
        numbers = Counter(number for rank in host for number in seen[rank]["numbers"])
        assert numbers == Counter(range(9))


def test_engines_without_shared_memory_shard_and_refuse_to_share_2_ranks(process_pool):
    pool = process_pool(2, "gloo")
    assert pool.run(zero_ranks.refused) == ["UsageError"] * 2
    for buckets in (False, True):
        assert pool.run(zero_ranks.plain_training, buckets) == [True, True]
