"""Redistribution on meshes of 1, 2 and 3 axes over worlds of 1 to 8 thread-ranks."""

from __future__ import annotations

import math

import pytest

from dure.testing import run_ranks
from tests.tensor.ranks import dtensor_worlds as worlds


@pytest.mark.parametrize("sizes", worlds.MESHES, ids=str)
def test_pairs_of_placements(sizes: tuple[int, ...]) -> None:
    most = 200 if math.prod(sizes) <= 4 else 100
    run_ranks(math.prod(sizes), worlds.redistributes, sizes, most)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 3, 2)], ids=str)
def test_all_placements_on_three_axes(sizes: tuple[int, ...]) -> None:
    run_ranks(math.prod(sizes), worlds.redistributes, sizes, 10_000)
