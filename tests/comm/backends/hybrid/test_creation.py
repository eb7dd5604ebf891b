"""Creation of hybrid groups: all ranks agree whether the group exists."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from dure.comm.backends.hybrid.creation import agree_on_completion
from dure.errors import RendezvousTimeout
from dure.store import HashStore
from tests.comm.options import options
from tests.store.counting import CountingStore


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
