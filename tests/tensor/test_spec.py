"""Which indices of a dimension each rank has, in the order of cuts that placements say."""

from __future__ import annotations

import pytest
import torch

from dure.tensor.spec import cuts_of, runs_of
from tests.tensor.ranks.dtensor_worlds import all_cuts, placements_of
from tests.tensor.ranks.parts import coordinates, order_of_cuts, part_of


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 3, 2)], ids=str)
def test_placements_say_the_order_of_cuts(sizes):
    for cuts, partial in all_cuts(sizes, 2, ["sum"]):
        placements = placements_of(cuts, sizes, partial)
        for dim, order in enumerate(cuts):
            # The library and the oracle of all other tests read the same.
            assert [cut.axis for cut in cuts_of(placements, sizes, dim)] == list(order)
            assert order_of_cuts(placements, sizes, dim) == [(axis, 1) for axis in order]


@pytest.mark.parametrize("size", [12, 7, 1, 0])
@pytest.mark.parametrize("sizes", [(3,), (3, 2), (2, 3, 2)], ids=str)
def test_each_rank_has_the_indices_that_chunks_leave_it(sizes, size):
    for cuts, _ in all_cuts(sizes, 1, ()):
        placements = placements_of(cuts, sizes, {})
        for coordinate in coordinates(sizes):
            runs = runs_of(size, cuts_of(placements, sizes, 0), sizes, coordinate)
            found = [index for length, offset in runs for index in range(offset, offset + length)]
            expected = part_of(torch.arange(size), placements, sizes, coordinate)
            assert found == expected.tolist(), placements
