"""Groups of processes: what making many at once asks of the store."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import dure as dist
from dure.comm.subgroups import new_groups
from dure.comm.world import current_world
from dure.errors import Desync
from dure.store.prefix import PrefixStore
from dure.testing import ProcessPool

AXES = [
    *([0, 4], [1, 5], [2, 6], [3, 7]),
    *([0, 2], [1, 3], [4, 6], [5, 7]),
    *([0, 1], [2, 3], [4, 5], [6, 7]),
]
"""The ranks along each axis of a mesh of 2 x 2 x 2."""


class Counting(PrefixStore):
    """A store that counts what it is asked."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        super().__init__("counted", store)
        self.counts = counts

    def _counted(self, what: str, *args: Any) -> Any:
        self.counts[what] += 1
        return getattr(super(), what)(*args)

    def set(self, *args: Any) -> None:
        self._counted("set", *args)

    def get(self, *args: Any) -> bytes:
        return self._counted("get", *args)

    def multi_set(self, *args: Any) -> None:
        self._counted("multi_set", *args)

    def multi_get(self, *args: Any) -> list[bytes]:
        return self._counted("multi_get", *args)

    def add(self, *args: Any) -> int:
        return self._counted("add", *args)


def count(rank: int, lists: list[list[int]]) -> dict[str, int]:
    """Return which visits to the store making groups takes; waiting is not counted."""
    meeting = current_world().rendezvous
    assert meeting is not None
    counts: Counter[str] = Counter()
    real, meeting.store = meeting.store, Counting(meeting.store, counts)
    try:
        groups = new_groups(lists)
    finally:
        meeting.store = real
    asked = dict(counts)
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.barrier(group)
            dist.destroy_process_group(group)
    return asked


def test_twelve_groups_ask_as_little_of_the_store_as_one_8_ranks(process_pool):
    pool = process_pool(8, "shm")
    asked = {"multi_set": 1, "multi_get": 1}
    assert pool.run(count, [list(range(8))]) == [asked] * 8
    assert pool.run(count, AXES) == [asked] * 8


def one_makes_a_group(rank: int) -> None:
    if rank == 0:
        dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4))


def one_goes_its_own_way(rank: int) -> dict[int, str]:
    with pytest.raises(Desync) as caught:
        one_makes_a_group(rank)
    return caught.value.calls


@pytest.mark.parametrize(
    ("backend", "hosts"), [("shm", None), ("hybrid", None), ("hybrid", ("a", "a", "b"))]
)
def test_new_group_on_one_rank_only_is_a_desync_with_both_lines_3_ranks(backend, hosts):
    with ProcessPool(3, backend, hosts=hosts) as pool:
        for calls in pool.run(one_goes_its_own_way):
            assert calls[0].startswith("new_group([0, 1])")
            assert calls[2].startswith("all_reduce(float32[4]")
            assert all("test_groups_made.py:" in text for text in calls.values())


def count_engines(rank: int) -> int:
    backend: Any = dist.group.WORLD._only
    return len(backend._comms.state.engines)


@pytest.mark.parametrize(("hosts", "wanted"), [("abc", [1, 1, 1]), ("aab", [2, 1, 2])])
def test_hosts_of_one_rank_are_joined_by_one_engine_3_ranks(hosts, wanted):
    with ProcessPool(3, "hybrid", hosts=hosts) as pool:
        assert pool.run(count_engines) == wanted
