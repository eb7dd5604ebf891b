"""Groups of processes: what making many at once asks of the store, and desyncs."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import dure as dist
from dure.comm.subgroups import new_groups
from dure.comm.world import current_world
from dure.errors import Desync
from dure.store.prefix import PrefixStore
from dure.testing import ProcessPool

FILE = Path(__file__).name

AXES = [
    *([0, 4], [1, 5], [2, 6], [3, 7]),
    *([0, 2], [1, 3], [4, 6], [5, 7]),
    *([0, 1], [2, 3], [4, 5], [6, 7]),
]
"""The ranks along each axis of a mesh of 2 x 2 x 2."""


ASKED = {"set", "get", "multi_set", "multi_get", "add"}


class Counting(PrefixStore):
    """A store that counts what it is asked."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        super().__init__("counted", store)
        self.counts = counts

    def __getattribute__(self, name: str) -> Any:
        if name in ASKED:
            self.counts[name] += 1
        return super().__getattribute__(name)


def count(rank: int, lists: list[list[int]]) -> dict[str, int]:
    """Return which visits to the store making groups takes; waiting is not counted."""
    joined = current_world().rendezvous
    assert joined is not None
    counts: Counter[str] = Counter()
    real, joined.store = joined.store, Counting(joined.store, counts)
    try:
        groups = new_groups(lists)
    finally:
        joined.store = real
    asked = dict(counts)
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.barrier(group)
            dist.destroy_process_group(group)
    return asked


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_twelve_groups_are_made_in_one_exchange_8_ranks(backend, process_pool):
    """A rank counts itself in each of its groups, and the last rank of each reads the entries."""
    pool = process_pool(8, backend)
    assert pool.run(count, [list(range(8))]) == [{"multi_set": 1, "add": 1, "multi_get": 1}] * 8
    asked = pool.run(count, AXES)
    assert [(each["multi_set"], each["add"]) for each in asked] == [(1, 3)] * 8
    assert len(AXES) <= sum(each["multi_get"] for each in asked) <= len(AXES) + 8


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
            assert all(FILE in text for text in calls.values())
