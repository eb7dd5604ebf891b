"""What a group is made of."""

from __future__ import annotations

import dure as dist
from dure.comm.world import current_world
from dure.testing import run_ranks


def _attributes(rank: int) -> None:
    group = current_world().default
    assert group is not None
    dist.monitored_barrier()
    # With more, CPython makes a table for each object: a small call then takes 0.07 us more.
    assert len(vars(group)) <= 30


def test_group_has_so_few_attributes_that_python_finds_them_at_fixed_places_2_ranks():
    run_ranks(2, _attributes)
