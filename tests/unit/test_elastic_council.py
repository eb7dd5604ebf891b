"""How a process comes to an epoch, with a store in this process and peers that are only written."""

from __future__ import annotations

import msgspec
import pytest

from dure.elastic.council import Council
from dure.elastic.roster import Member, Plan
from dure.errors import RendezvousError
from dure.store import HashStore
from dure.store.identity import Identity


def test_a_newcomer_does_not_wait_for_ever_for_ranks_of_hosts_that_may_be_lost():
    store = HashStore()
    far = Member("far", 0, Identity(1, "1", "elsewhere", "another host"))
    store.set("0/plan", msgspec.msgpack.encode(Plan(number=0, members=(far,), known=("far",))))
    with pytest.raises(RendezvousError) as caught:
        Council(store, 1, 2, patience_s=0.2).enter()
    assert caught.value.rank == 1
    assert caught.value.elapsed_s == 0.2
