"""Gatherings: what they cost each rank; ranks that are late, hang or give up."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import msgspec
import pytest

from dure.errors import StoreTimeout
from dure.store import HashStore
from dure.store import gathering as module
from dure.store.gathering import Gathering, gather, gather_all, wait_for_summaries
from tests.waiting import until

from .conftest import TIMEOUT
from .counting import CountingStore

AT_ONCE = timedelta(microseconds=1)


def first(entries: list[bytes]) -> bytes:
    return entries[0]


def gathered_by(size: int) -> list[CountingStore]:
    """Let all ranks gather a summary of fixed length; return their stores."""
    shared = HashStore(TIMEOUT)
    stores = [CountingStore(shared) for _ in range(size)]

    def be(rank: int) -> None:
        entry = b"%03d" % rank
        assert gather(stores[rank], "a", rank, size, entry, TIMEOUT, first) == b"000"

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(be, range(size)))
    return stores


def test_requests_and_bytes_of_a_rank_do_not_grow_with_256_ranks() -> None:
    few, many = gathered_by(16), gathered_by(256)
    for stores in (few, many):
        # Write, count, wait and read; the last one checks the entries, reads them and publishes.
        assert sorted(store.num_requests for store in stores) == [4] * (len(stores) - 1) + [5]
    middle = [statistics.median(store.num_bytes for store in stores) for stores in (few, many)]
    assert middle[1] < 1.1 * middle[0]
    assert sum(store.num_bytes > 2 * middle[1] for store in many) == 1  # it reads all entries


def test_all_entries_come_in_the_order_of_ranks() -> None:
    store = HashStore(TIMEOUT)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(gather_all, store, "a", r, 3, b"%d" % r, TIMEOUT) for r in (2, 0, 1)]
        assert [each.result() for each in asked] == [[b"0", b"1", b"2"]] * 3


def test_a_rank_that_gives_up_asks_once_who_is_missing() -> None:
    store = CountingStore(HashStore(TIMEOUT))
    with pytest.raises(StoreTimeout) as caught:
        gather_all(store, "a", 7, 256, b"", AT_ONCE)
    assert caught.value.keys == tuple(f"a/member/{r}" for r in range(256) if r != 7)
    # Write, count, wait, ask who is missing and whether all have come; two requests withdraw.
    assert store.num_requests == 7


def test_ranks_that_give_up_one_after_another_name_the_same_missing_rank() -> None:
    store = HashStore(TIMEOUT)
    arrived = [_arrived(store, rank, 4) for rank in range(3)]
    found = [wait_for_summaries(store, [each], AT_ONCE) for each in arrived]
    assert [late and late[1] for late in found] == [(3,), (3,), (3,)]


def test_entries_of_an_earlier_gathering_do_not_stand_in_for_a_rank_that_does_not_come() -> None:
    store = HashStore(TIMEOUT)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(gather_all, store, "a", r, 2, b"old", TIMEOUT) for r in range(2)]
        assert [each.result() for each in asked] == [[b"old"] * 2] * 2
    with pytest.raises(StoreTimeout):
        gather_all(store, "a", 0, 2, b"new", AT_ONCE)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(gather_all, store, "a", r, 2, b"new", TIMEOUT) for r in range(2)]
        assert [each.result() for each in asked] == [[b"new"] * 2] * 2


def test_who_withdrew_is_named_where_all_have_entries() -> None:
    store = HashStore(TIMEOUT)
    with pytest.raises(StoreTimeout):
        gather_all(store, "a", 1, 2, b"", AT_ONCE)
    store.set("a/member/0", b"")
    with pytest.raises(StoreTimeout) as caught:
        gather_all(store, "a", 0, 2, b"", AT_ONCE)
    assert caught.value.keys == ("a/member/1",)


def test_ranks_that_gave_up_can_gather_again_under_the_same_name() -> None:
    store = HashStore(TIMEOUT)
    with pytest.raises(StoreTimeout):
        gather_all(store, "a", 0, 2, b"old", AT_ONCE)
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(gather_all, store, "a", r, 2, b"new", TIMEOUT) for r in range(2)]
            assert [each.result() for each in asked] == [[b"new"] * 2] * 2


def _arrived(store: HashStore, rank: int, size: int) -> Gathering:
    each = Gathering(store, "a", rank, size)
    store.set(each.entry_key(rank), b"%d" % rank)
    each.arrive()
    return each


def test_a_rank_that_withdraws_when_all_have_come_is_not_out() -> None:
    store = HashStore(TIMEOUT)
    early = _arrived(store, 0, 2)
    late = _arrived(store, 1, 2)
    assert not early.withdraw()
    assert late.summary is not None
    assert store.get("a/count") == b"2"
    assert store.check([early.entry_key(0)])
    assert wait_for_summaries(store, [early], AT_ONCE) is None
    assert early.summary == late.summary


class _HangingGathering(Gathering):
    """The gathering of a rank that hangs as soon as it is counted."""

    def conclude(self) -> None:
        pass


def _hangs(store: HashStore, rank: int, size: int) -> None:
    each = _HangingGathering(store, "a", rank, size)
    store.set(each.entry_key(rank), b"%d" % rank)
    each.arrive()


def test_others_publish_for_a_last_rank_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DOUBT_S", 0.01)
    store = HashStore(TIMEOUT)
    waits = _arrived(store, 1, 2)
    _hangs(store, 0, 2)
    assert wait_for_summaries(store, [waits], TIMEOUT) is None
    assert waits.summary == msgspec.msgpack.encode([b"0", b"1"])


def test_a_number_that_two_ranks_have_leaves_another_one_missing() -> None:
    store = HashStore(TIMEOUT)
    with ThreadPoolExecutor(2) as pool:
        first_limit = timedelta(milliseconds=20)
        asked = [pool.submit(gather_all, store, "a", 0, 2, "", first_limit) for _ in range(2)]
        for each in asked:
            with pytest.raises(StoreTimeout) as caught:
                each.result()
            assert "a/member/1" in caught.value.keys


def test_a_rank_publishes_at_its_limit_for_a_last_one_that_hangs() -> None:
    store = HashStore(TIMEOUT)
    waits = _arrived(store, 1, 2)
    _hangs(store, 0, 2)
    assert wait_for_summaries(store, [waits], AT_ONCE) is None
    assert waits.summary == msgspec.msgpack.encode([b"0", b"1"])


def test_a_rank_that_waits_for_long_asks_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the count, in requests of the same few bytes for any number of ranks."""
    monkeypatch.setattr(module, "_DOUBT_S", 0.001)
    store = CountingStore(HashStore(TIMEOUT))
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(gather, store, "a", 0, 2, b"", TIMEOUT, first)
        until(lambda: time.monotonic() > began + 0.5)
        # Write and count; then a wait and a question per doubling of the time: at most ten.
        assert 8 < store.num_requests < 2 + 2 * 11
        assert store.num_bytes < 100 * store.num_requests
        gather(store, "a", 1, 2, b"", TIMEOUT, first)
        assert waits.result() == b""


def test_of_several_gatherings_each_is_published_when_it_is_complete() -> None:
    store = HashStore(TIMEOUT)
    both = [Gathering(store, name, 0, 2) for name in ("a", "b")]
    for each in both:
        store.set(each.entry_key(0), "")
        each.arrive()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(wait_for_summaries, store, both, TIMEOUT)
        assert gather_all(store, "a", 1, 2, "", TIMEOUT) == [b"", b""]
        assert not waits.done()
        assert gather_all(store, "b", 1, 2, "", TIMEOUT) == [b"", b""]
        assert waits.result() is None
