"""What groups of many ranks cost one rank, counted: nothing grows as the square of the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

import dure as dist
from dure.comm.rank_text import listed_ranks, name_of_ranks
from dure.device_mesh import init_device_mesh
from dure.testing.ranks import new_world
from tests.work_counts import kept_bytes, num_calls

FEW, MANY = 256, 1024
SHAPES = {FEW: (4, 8, 8), MANY: (4, 16, 16)}

MAKERS: dict[str, Callable[[int], object]] = {
    "new_group": lambda ranks: dist.new_group(),
    "half": lambda ranks: dist.new_group(list(range(0, ranks, 2))),
    "split_group": lambda ranks: dist.split_group(
        split_ranks=[list(range(first, first + 8)) for first in range(0, ranks, 8)]
    ),
    "new_subgroups": lambda ranks: dist.new_subgroups(8),
    "mesh": lambda ranks: init_device_mesh("cpu", SHAPES[ranks]),
}


def _costs(make: Callable[[int], object], ranks: int) -> tuple[int, int]:
    """Return the calls of functions, and the bytes that are kept, to make groups on one rank."""
    assert math.prod(SHAPES[ranks]) == ranks
    with new_world():
        dist.init_process_group("fake", rank=ranks // 2, world_size=ranks)
        try:
            make(ranks)  # what is imported or cached once
            return num_calls(lambda: make(ranks)), kept_bytes(lambda: make(ranks))
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("name", MAKERS)
def test_calls_and_bytes_grow_no_faster_than_the_ranks(name: str):
    few, many = _costs(MAKERS[name], FEW), _costs(MAKERS[name], MANY)
    assert many[0] <= 4 * few[0], "calls of functions"
    # Python has one object of each number below 257, so others cost more.
    assert many[1] <= 6 * few[1], "bytes that are kept"


def test_a_group_of_256_ranks_has_a_short_name_on_its_members():
    with new_world():
        dist.init_process_group("fake", rank=1, world_size=1000)
        group = dist.split_group(split_ranks=[list(range(256)), list(range(256, 1000))])
        assert group is not None
        name = group.group_name
        dist.destroy_process_group()
    assert name.startswith("0-to-255-of-256-")
    assert len(name) < 60


@pytest.mark.parametrize("text", [listed_ranks, name_of_ranks])
def test_texts_of_many_ranks_are_short_and_differ(text: Callable[[list[int]], str]):
    ranks = list(range(10_000))
    swapped = [*ranks[:5000], 5001, 5000, *ranks[5002:]]
    assert len(text(ranks)) < 200
    assert len({text(ranks), text(swapped), text(ranks[:-1]), text(ranks[::-1])}) == 4
    assert text(ranks) == text(list(range(10_000)))


def test_texts_of_few_ranks_have_all_of_them():
    ranks = list(range(64))
    assert listed_ranks(ranks) == str(ranks)
    assert name_of_ranks((3, 1, 2)) == "3-1-2"
    assert name_of_ranks(ranks).endswith("-61-62-63")
