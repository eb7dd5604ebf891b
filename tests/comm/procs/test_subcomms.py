"""Who is where: the engines and backends of groups over hosts that are only pretended."""

from __future__ import annotations

from typing import Any

import pytest

import dure as dist
from dure.testing import ProcessPool
from dure.trace import recorded

pytestmark = pytest.mark.needs("engine")


@pytest.fixture(scope="module", params=["aabb", "abca"])
def pool(request):
    with ProcessPool(4, None, hosts=request.param) as pool:
        yield pool


def _kinds(rank: int) -> tuple[str, str, str]:
    hosts = dist.group.WORLD.hosts
    groups = [dist.new_group(ranks) for ranks in hosts]  # all ranks make all of them
    mine = next(g for ranks, g in zip(hosts, groups, strict=True) if rank in ranks)
    kinds = [type(group._first).__name__ for group in (dist.group.WORLD, mine)]
    return dist.get_backend(), kinds[0], kinds[1]


def test_default_over_hosts_is_hybrid_and_a_group_of_one_host_is_shared_memory(pool):
    assert set(pool.run(_kinds)) == {("hybrid", "HybridBackend", "ShmBackend")}


def _recorded(rank: int) -> tuple[set[str], str]:
    """Return which groups are in this rank's flight record, and the name of a host's own group."""
    hosts = dist.group.WORLD.hosts
    groups = [dist.new_group(ranks) for ranks in hosts]
    mine = next(g for ranks, g in zip(hosts, groups, strict=True) if rank in ranks)
    dist.barrier(mine)
    dist.barrier()
    return {record.group for record in recorded()}, mine.group_name


def test_flight_records_show_the_groups_of_the_program_and_not_their_parts(pool):
    for groups, mine in pool.run(_recorded):
        assert {"world", mine} <= groups
        assert not any("local" in name for name in groups), groups


def count_engines(rank: int) -> int:
    backend: Any = dist.group.WORLD._first
    return len(backend._comms.state.engines)


@pytest.mark.parametrize(("hosts", "wanted"), [("abc", [1, 1, 1]), ("aab", [2, 1, 2])])
def test_hosts_of_one_rank_are_joined_by_one_engine_3_ranks(hosts, wanted):
    with ProcessPool(3, "hybrid", hosts=hosts) as pool:
        assert pool.run(count_engines) == wanted
