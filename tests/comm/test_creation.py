"""The store of a group that is being made: what its waits notice, also later."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from dure.comm.creation import GroupSpec, WatchedStore
from dure.errors import StoreTimeout
from dure.store import HashStore
from dure.store.rendezvous import rendezvous
from tests.waiting import PATIENCE_S

LONG = timedelta(seconds=PATIENCE_S)


def test_waits_go_on_after_the_world_shrank_and_its_ranks_have_new_numbers():
    shared = HashStore()
    with ThreadPoolExecutor(3) as pool:
        joins = [pool.submit(rendezvous, None, r, 3, shared, LONG) for r in range(3)]
        made = [join.result() for join in joins]
    joined = made[2]
    spec = GroupSpec(name="g", global_ranks=(1, 2), backend="gloo", timeout=LONG)
    watched = WatchedStore(joined.store, spec, joined.members)
    joined.go_on_with([1, 2], "after")
    with pytest.raises(StoreTimeout):  # and no error of the look at who lives
        watched.wait(["never"], timedelta(seconds=0.1))
    assert not watched.check(["never"])
    for one in made:
        one.close()
