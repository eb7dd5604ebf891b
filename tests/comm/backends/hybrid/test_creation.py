"""Creation of hybrid groups: all ranks agree whether the group exists."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from msgspec.structs import replace

from dure.comm.backends.hybrid.creation import agree_on_completion
from dure.comm.creation import GroupSpec, WatchedStore
from dure.errors import PeerLost, RendezvousTimeout
from dure.store import HashStore
from dure.store.builds import own_build
from dure.store.gathering import Gathering
from dure.store.identity import myself
from dure.store.members import MemberTable, RendezvousMember
from tests.comm.options import options
from tests.store.conftest import dead_process
from tests.store.counting import CountingStore
from tests.waiting import PATIENCE_S, until

LONG = timedelta(seconds=PATIENCE_S)


@pytest.mark.parametrize("late", [(1,), (1, 2), (2, 1)])
def test_ranks_that_are_ready_after_the_others_gave_up_raise_as_they_do(late):
    """All name the ranks that were late when the first one gave up."""
    store, ranks = HashStore(), (0, *late)
    for rank in ranks:
        with pytest.raises(RendezvousTimeout) as info:
            agree_on_completion(options(rank, len(ranks), store, timeout_s=0.001))
        assert info.value.missing == tuple(sorted(late))
        assert ("this rank was late" in str(info.value)) == (rank in late)


def test_a_late_rank_does_not_wait_for_those_that_gave_up():
    store = HashStore()
    for rank, timeout_s in ((0, 0.001), (2, 3600.0), (1, 3600.0)):
        with pytest.raises(RendezvousTimeout) as info:
            agree_on_completion(options(rank, 3, store, timeout_s=timeout_s))
        assert info.value.missing == (1, 2)


def test_256_ranks_ask_for_four_keys_each_to_be_ready():
    shared = HashStore()
    stores = [CountingStore(shared) for _ in range(256)]
    with ThreadPoolExecutor(256) as pool:
        ready = lambda r: agree_on_completion(options(r, 256, stores[r]))  # noqa: E731
        list(pool.map(ready, range(256)))
    assert max(store.num_requests for store in stores) <= 4
    assert max(store.num_bytes for store in stores) < 500


def test_a_last_rank_that_dies_before_its_verdict_is_noticed_on_all_hosts():
    """Rank 2 ends when it has been counted; rank 1 is on its host, rank 0 on another one."""
    shared, dead, here = HashStore(), dead_process(), myself()
    processes = (replace(here, host_id="elsewhere"), here, dead)
    members = MemberTable.of(
        RendezvousMember(rank, 3, process, "", own_build())
        for rank, process in enumerate(processes)
    )
    spec = GroupSpec(name="g", global_ranks=(0, 1, 2), backend="hybrid", timeout=LONG)
    name = "group/g/0/hybrid/ready"

    def agree(rank: int) -> tuple[int | None, bool]:
        store = WatchedStore(shared, spec, members, rank)
        mine = options(rank, 3, store, name="g", timeout_s=PATIENCE_S)
        with pytest.raises(PeerLost) as caught:
            agree_on_completion(mine)
        return caught.value.peer, f"pid {dead.pid}" in caught.value.seen

    with ThreadPoolExecutor(2) as pool:
        agreed = [pool.submit(agree, rank) for rank in range(2)]
        until(lambda: shared.check([f"{name}/0/member/{rank}" for rank in range(2)]))
        Gathering(shared, name, 2, 3).count()
        assert [each.result(PATIENCE_S) for each in agreed] == [(2, True)] * 2
