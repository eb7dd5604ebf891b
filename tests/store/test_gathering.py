"""Gatherings: what they cost each rank, and the one verdict of ranks that are late or die."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest

from dure.errors import RendezvousError, RendezvousTimeout
from dure.store import HashStore
from dure.store import gathering as module
from dure.store.gathering import Gathering, gather, gather_all, wait_for_verdicts
from dure.store.wire import Reply, StoreRequest
from tests.waiting import PATIENCE_S, until

from .conftest import TIMEOUT
from .counting import CountingStore

AT_ONCE = timedelta(microseconds=1)


def first(entries: list[bytes]) -> bytes:
    return entries[0]


def among(store: HashStore, rank: int, size: int, name: str = "a", once: bool = False) -> Gathering:
    return Gathering(store, name, rank, size, once=once)


def all_of(size: int, gather_one: Callable[[int], object]) -> list[object]:
    """Let all ranks gather at once; return what each has returned."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(gather_one, range(size)))


def gathered_by(size: int) -> list[CountingStore]:
    """Let all ranks gather a summary of fixed length; return their stores."""
    shared = HashStore(TIMEOUT)
    stores = [CountingStore(shared) for _ in range(size)]

    def be(rank: int) -> None:
        gathering = Gathering(stores[rank], "a", rank, size, first)
        assert gather(gathering, b"%03d" % rank, TIMEOUT) == b"000"

    all_of(size, be)
    return stores


def test_requests_and_bytes_of_a_rank_do_not_grow_with_256_ranks() -> None:
    few, many = gathered_by(16), gathered_by(256)
    for stores in (few, many):
        # Count, write, wait and read; the last one waits for entries, reads them and publishes.
        assert sorted(store.num_requests for store in stores) == [4] * (len(stores) - 1) + [5]
    middle = [statistics.median(store.num_bytes for store in stores) for stores in (few, many)]
    assert middle[1] < 1.1 * middle[0]
    assert sum(store.num_bytes > 2 * middle[1] for store in many) == 1  # it reads all entries


def test_all_entries_come_in_the_order_of_ranks() -> None:
    store = HashStore(TIMEOUT)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(gather_all, among(store, r, 3), b"%d" % r, TIMEOUT) for r in (2, 0, 1)]
        assert [each.result() for each in asked] == [[b"0", b"1", b"2"]] * 3


# ---- ranks that do not come ----------------------------------------------------------------------


def test_a_rank_that_gives_up_asks_once_who_is_missing() -> None:
    store = CountingStore(HashStore(TIMEOUT))
    with pytest.raises(RendezvousTimeout) as caught:
        gather_all(among(store, 7, 256), b"", AT_ONCE)
    assert caught.value.missing == tuple(r for r in range(256) if r != 7)
    assert caught.value.came == (7,)
    # Count, write and wait; two requests close; ask who is missing, and publish that.
    assert store.num_requests == 7


def test_of_256_ranks_whose_time_is_up_at_once_few_ask_who_is_missing() -> None:
    shared = HashStore(TIMEOUT)
    stores = [CountingStore(shared) for _ in range(256)]
    limit = timedelta(seconds=1)

    def be(rank: int) -> tuple[int, ...]:
        with pytest.raises(RendezvousTimeout) as caught:
            gather_all(among(stores[rank], rank, 257), b"", limit)
        return caught.value.missing

    assert all_of(256, be) == [(256,)] * 256
    # Count, write, wait, two to close, maybe in vain, once more to see that; wait and read. A rank
    # that has waited for long asks for the count and for who is missing.
    assert max(store.num_requests for store in stores) <= 12
    assert sum(store.num_bytes > 3000 for store in stores) <= 8


def test_ranks_with_a_long_limit_follow_the_first_one_that_gives_up() -> None:
    store = HashStore(TIMEOUT)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(gather_all, among(store, r, 4), b"", TIMEOUT) for r in (0, 1)]
        until(lambda: store.check(["a/0/member/0", "a/0/member/1"]))
        with pytest.raises(RendezvousTimeout) as caught:
            gather_all(among(store, 2, 4), b"", AT_ONCE)
        assert caught.value.missing == (3,)
        for each in waits:
            with pytest.raises(RendezvousTimeout) as caught:
                each.result(PATIENCE_S)
            assert caught.value.missing == (3,)


def test_entries_of_an_earlier_gathering_do_not_stand_in_for_a_rank_that_does_not_come() -> None:
    store = HashStore(TIMEOUT)
    assert (
        all_of(2, lambda r: gather_all(among(store, r, 2), b"old", TIMEOUT)) == [[b"old"] * 2] * 2
    )
    with pytest.raises(RendezvousTimeout) as caught:
        gather_all(among(store, 0, 2), b"new", AT_ONCE)
    assert caught.value.missing == (1,)
    assert (
        all_of(2, lambda r: gather_all(among(store, r, 2), b"new", TIMEOUT)) == [[b"new"] * 2] * 2
    )


def test_ranks_that_gave_up_can_gather_again_under_the_same_name() -> None:
    store = HashStore(TIMEOUT)
    with pytest.raises(RendezvousTimeout):
        gather_all(among(store, 0, 2), b"old", AT_ONCE)
    for _ in range(2):
        found = all_of(2, lambda r: gather_all(among(store, r, 2), b"new", TIMEOUT))
        assert found == [[b"new"] * 2] * 2


def test_a_late_rank_follows_the_others_if_the_name_is_used_once() -> None:
    store = HashStore(TIMEOUT)
    with pytest.raises(RendezvousTimeout):
        gather_all(among(store, 0, 2, once=True), b"", AT_ONCE)
    with pytest.raises(RendezvousTimeout) as caught:
        gather_all(among(store, 1, 2, once=True), b"", TIMEOUT)
    assert (caught.value.came, caught.value.missing) == ((0,), (1,))


# ---- one verdict ---------------------------------------------------------------------------------


class _PausingStore(CountingStore):
    """A rank's store that lets another rank act before, or after, a chosen request."""

    def __init__(self, shared: HashStore, op: str, key: str, act: Callable[[], object]) -> None:
        super().__init__(shared)
        self._when, self._act, self._done = (op, key), act, False

    def _answered(self, request: StoreRequest, patience_s: float) -> Reply | None:
        op, key = self._when
        if not self._done and request.op == op and key in str(request):
            self._done = True
            self._act()
        return super()._answered(request, patience_s)


def _agree_if(paused: int, op: str, key: str, acting: int) -> list[object]:
    """Let rank `acting` of three come just before a request of rank `paused`; return all results.

    Ranks 0 and 1 wait, and rank 2 comes last; the limit of rank 0 is over when it has come.
    """
    shared, results = HashStore(TIMEOUT), dict[int, object]()

    def be(rank: int, store: HashStore) -> None:
        limit = AT_ONCE if rank == 0 else TIMEOUT
        try:
            results[rank] = gather_all(among(store, rank, 3, once=True), b"%d" % rank, limit)
        except RendezvousTimeout as error:
            results[rank] = error.missing

    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(be, 1, shared)
        until(lambda: shared.check(["a/0/member/1"]))
        acts: list[Future[None]] = []

        def act() -> None:
            acts.append(pool.submit(be, acting, shared))
            end = acts[0].done if op == "add" else lambda: shared.check([f"a/0/member/{acting}"])
            until(end)

        be(paused, _PausingStore(shared, op, key, act))
        for each in (*acts, waits):
            each.result(PATIENCE_S)
    return [results[rank] for rank in range(3)]


def test_ranks_agree_if_the_last_one_comes_while_another_gives_up() -> None:
    """Rank 0 is about to close the gathering, and then rank 2 comes: all have come."""
    all_came = [b"0", b"1", b"2"]
    assert _agree_if(0, "compare_set", "a/0/count", acting=2) == [all_came] * 3


@pytest.mark.parametrize("op", ["set", "wait"])
def test_ranks_agree_if_one_gives_up_while_the_last_one_comes(op: str) -> None:
    """Rank 2 has been counted, or has written its entry, and then rank 0 comes to its limit."""
    all_came = [b"0", b"1", b"2"]
    assert _agree_if(2, op, "a/0/", acting=0) == [all_came] * 3


def test_ranks_agree_if_one_gives_up_before_the_last_one_is_counted() -> None:
    assert _agree_if(2, "add", "a/0/count", acting=0) == [(2,)] * 3


def test_ranks_that_fail_are_not_waited_for() -> None:
    store = HashStore(TIMEOUT)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(gather_all, among(store, 1, 3), b"", TIMEOUT)
        until(lambda: store.check(["a/0/member/1"]))
        fails = among(_PausingStore(store, "wait", "", _interrupt), 0, 3)
        with pytest.raises(KeyboardInterrupt):
            gather_all(fails, b"", TIMEOUT)
        with pytest.raises(RendezvousError) as caught:
            waits.result(PATIENCE_S)
    assert caught.value.peer == 0
    assert caught.value.seen == "KeyboardInterrupt: "
    found = all_of(3, lambda r: gather_all(among(store, r, 3), b"new", TIMEOUT))
    assert found == [[b"new"] * 3] * 3


def _interrupt() -> None:
    raise KeyboardInterrupt


def _counted(store: HashStore, rank: int, size: int, entry: bytes | None = None) -> Gathering:
    """Return the gathering of a rank that ends when it has been counted, or written its entry."""
    gathering = among(store, rank, size)
    gathering.count()
    if entry is not None:
        store.set(gathering.entry_key(rank), entry)
    return gathering


def _waits(store: HashStore, rank: int, size: int, limit: timedelta = TIMEOUT) -> list[bytes]:
    return gather_all(among(store, rank, size), b"%d" % rank, limit)


def test_others_publish_for_a_last_rank_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DOUBT_S", 0.01)
    store = HashStore(TIMEOUT)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(_waits, store, 1, 2)
        until(lambda: store.check(["a/0/member/1"]))
        _counted(store, 0, 2, b"0")
        assert waits.result(PATIENCE_S) == [b"0", b"1"]


def test_a_rank_publishes_at_its_limit_for_a_last_one_that_hangs() -> None:
    shared = HashStore(TIMEOUT)
    store = _PausingStore(shared, "wait", "", lambda: _counted(shared, 0, 2, b"0"))
    assert _waits(store, 1, 2, AT_ONCE) == [b"0", b"1"]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that are not there at once are missing."""
    monkeypatch.setattr(module, "_WRITE_S", 0.05)
    monkeypatch.setattr(module, "_DOUBT_S", 0.05)


@pytest.mark.usefixtures("hurried")
def test_a_process_that_replaces_a_counted_rank_does_not_stand_in_for_another_rank() -> None:
    """Rank 0 ends when it has been counted, and is replaced: the count is complete without 2."""
    store = HashStore(TIMEOUT)
    _counted(store, 0, 3, b"dead")
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(_waits, store, rank, 3) for rank in (0, 1)]
        until(lambda: store.get("a/0/count") == b"3")
        waits.append(pool.submit(_waits, store, 2, 3))
        assert [each.result(PATIENCE_S) for each in waits] == [[b"0", b"1", b"2"]] * 3


@pytest.mark.usefixtures("hurried")
def test_a_rank_that_ends_between_its_count_and_its_entry_is_the_one_that_is_missing() -> None:
    store = HashStore(TIMEOUT)
    _counted(store, 1, 3)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(_waits, store, r, 3, timedelta(seconds=0.5)) for r in (0, 2)]
        for each in waits:
            with pytest.raises(RendezvousTimeout) as caught:
                each.result(PATIENCE_S)
            assert caught.value.missing == (1,)


def test_ranks_that_repeat_near_their_limit_name_only_the_one_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_WRITE_S", 1.0)
    store = HashStore(TIMEOUT)
    store.add("a/0/count", 1)  # rank 1, which ends before its entry
    limit = timedelta(seconds=0.7)

    def be(rank: int) -> tuple[int, ...]:
        with pytest.raises(RendezvousTimeout) as caught:
            gather_all(among(store, rank, 4, once=True), b"", limit)
        return caught.value.missing

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(be, (0, 2, 3))) == [(1,)] * 3


@pytest.mark.usefixtures("hurried")
def test_a_number_that_two_ranks_have_leaves_another_one_missing() -> None:
    """They do not wait for it until their limit: the count is complete twice."""
    store = HashStore(TIMEOUT)
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(_waits, store, 0, 2) for _ in range(2)]:
            with pytest.raises(RendezvousTimeout) as caught:
                each.result(PATIENCE_S)
            assert caught.value.missing == (1,)


def test_a_rank_that_waits_for_long_asks_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the count, in requests of the same few bytes for any number of ranks."""
    monkeypatch.setattr(module, "_DOUBT_S", 0.001)
    store = CountingStore(HashStore(TIMEOUT))
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(_waits, store, 0, 2)
        until(lambda: time.monotonic() > began + 0.5)
        # Write and count; then a wait and a question per doubling of the time: at most ten.
        assert 8 < store.num_requests < 2 + 2 * 11
        assert store.num_bytes < 100 * store.num_requests
        _waits(store, 1, 2)
        assert waits.result() == [b"0", b"1"]


# ---- several gatherings --------------------------------------------------------------------------


def test_of_several_gatherings_each_is_published_when_it_is_complete() -> None:
    store = HashStore(TIMEOUT)
    both = [among(store, 0, 2, name) for name in ("a", "b")]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(wait_for_verdicts, both, TIMEOUT)
        assert gather_all(among(store, 1, 2, "a"), "", TIMEOUT) == [b"", b""]
        assert not waits.done()
        assert gather_all(among(store, 1, 2, "b"), "", TIMEOUT) == [b"", b""]
        assert waits.result() is None


def test_a_rank_of_several_gatherings_learns_that_one_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    store = HashStore(TIMEOUT)
    both = [among(store, 0, 2, name) for name in ("a", "b")]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(wait_for_verdicts, both, TIMEOUT)
        until(lambda: store.check(["a/0/member/0", "b/0/member/0"]))
        fails = among(store, 1, 2, "b")
        fails.count()
        fails.give_up(ValueError("no"))
        assert waits.result(PATIENCE_S) is both[1]
    assert both[1].verdict is not None
    assert both[1].verdict.why == "ValueError: no"
