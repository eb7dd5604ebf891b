"""Transactions, leases and watching, in every store that has them."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from dure.errors import StoreLost
from dure.store import EtcdStore, HashStore, JobKey
from dure.store.address import Address
from dure.store.key import mint
from dure.store.listener import listen
from dure.store.network import NetworkStore
from dure.store.server import StoreServer
from dure.store.shared import EVERYTHING, Shared
from tests.store.procs import etcd
from tests.store.procs.relay import Relay
from tests.waiting import PATIENCE_S, until

from .conftest import TIMEOUT, etcd_url

LOOPBACK = Address(family=socket.AF_INET, ip="127.0.0.1", port=0)


@pytest.fixture
def key() -> JobKey:
    return mint()


@pytest.fixture
def presence() -> list[tuple[str, bool]]:
    return []


@pytest.fixture
def server(key: JobKey, presence: list[tuple[str, bool]]) -> Iterator[StoreServer]:
    it = StoreServer(listen(LOOPBACK), key, lambda name, here: presence.append((name, here)))
    yield it
    it.stop()


@pytest.fixture(params=["hash", "network", "etcd"])
def shared(request: pytest.FixtureRequest, server: StoreServer, key: JobKey) -> Iterator[Shared]:
    with opened(request.param, server, key) as store:
        yield store


@contextmanager
def opened(kind: str, server: StoreServer, key: JobKey) -> Iterator[Shared]:
    if kind == "hash":
        store = HashStore(TIMEOUT)
    elif kind == "network":
        store = client(server, key)
    else:
        store = EtcdStore.from_url(etcd_url(), TIMEOUT)
    yield store
    store.close()


def client(server: StoreServer, key: JobKey) -> NetworkStore:
    return NetworkStore(server.endpoint, key, TIMEOUT)


def test_a_transaction_writes_all_or_nothing(shared: Shared) -> None:
    assert shared.transact({"a": None}, {"a": b"1", "b": b"2"})
    assert not shared.transact({"a": None}, {"a": b"x", "c": b"x"})
    assert not shared.transact({"a": b"1", "b": b"other"}, {"a": b"x"})
    assert shared.look("", EVERYTHING, 0)[1] == {"a": b"1", "b": b"2"}
    assert shared.transact({"a": b"1", "b": b"2"}, {"a": None, "b": b"3"})
    assert shared.look("", EVERYTHING, 0)[1] == {"b": b"3"}


def test_a_look_returns_when_something_below_its_prefix_changes(shared: Shared) -> None:
    revision, there = shared.look("p/", EVERYTHING, 0)
    assert there == {}
    with ThreadPoolExecutor(1) as pool:
        news = pool.submit(shared.look, "p/", revision, PATIENCE_S)
        shared.transact({}, {"q/x": b"0"})
        assert not news.done()
        shared.transact({}, {"p/x": b"1", "q/x": None})
        later, there = news.result()
    assert there == {"p/x": b"1"}
    assert later > revision
    assert shared.look("p/", revision, PATIENCE_S)[1] == {"p/x": b"1"}  # at once
    assert shared.look("p/", later, 0.02)[0] == later  # at the timeout


def test_a_lease_ends_when_it_is_released_or_its_key_is_written(shared: Shared) -> None:
    shared.hold("me", b"id", 60)
    shared.hold("other", b"id", 60)
    assert shared.look("", EVERYTHING, 0)[1] == {"me": b"id", "other": b"id"}
    assert shared.renew("me")
    shared.release("me")
    assert not shared.renew("me")
    assert not shared.transact({"me": b"id"}, {"state": b""})
    assert shared.transact({"other": b"id"}, {"other": b"written"})
    assert not shared.renew("other")
    assert shared.look("", EVERYTHING, 0)[1] == {"other": b"written"}


def test_a_key_vanishes_when_its_lease_is_over(server: StoreServer, key: JobKey) -> None:
    """On a real clock, in all stores at once; `Board` has a clock of its own below."""
    with ExitStack() as all_opened:
        kinds = ["hash", "network", *(["etcd"] if etcd.PROGRAM else [])]
        stores = [all_opened.enter_context(opened(kind, server, key)) for kind in kinds]
        for store in stores:
            store.hold("written", b"id", 2)
            store.transact({}, {"written": b"v"})
            store.hold("me", b"id", 2)
        for store in stores:
            revision, there = store.look("", EVERYTHING, 0)
            while "me" in there:
                revision, there = store.look("", revision, PATIENCE_S)
            assert there == {"written": b"v"}
            assert not store.renew("me")


def test_a_broken_connection_is_told_of_and_comes_back(
    server: StoreServer, key: JobKey, presence: list[tuple[str, bool]]
) -> None:
    with Relay(server.port) as relay:
        store = NetworkStore(f"tcp://127.0.0.1:{relay.port}", key, TIMEOUT)
        store.hold("me", b"id", 60)
        relay.cut()
        until(lambda: len(presence) == 2)
        assert store.renew("me")
        assert presence == [("me", True), ("me", False), ("me", True)]
        store.close()
        until(lambda: presence[-1] == ("me", False))


def test_what_was_asked_through_a_connection_that_breaks_is_done_once(
    server: StoreServer, key: JobKey
) -> None:
    """The ninth packet of each connection to a client is an answer, and is lost with it."""
    with Relay(server.port, lose=9) as relay, ThreadPoolExecutor(2) as pool:
        store = NetworkStore(f"tcp://127.0.0.1:{relay.port}", key, TIMEOUT)
        sums = [pool.submit(lambda: [store.add("n", 1) for _ in range(40)]) for _ in range(2)]
        assert sorted(n for some in sums for n in some.result()) == list(range(1, 81))
        assert relay.lost > 3
        store.close()


def test_another_server_at_the_same_endpoint_is_not_taken_for_the_lost_one(
    key: JobKey, port: int
) -> None:
    here = Address(family=socket.AF_INET, ip="127.0.0.1", port=port)
    first = StoreServer(listen(here), key)
    store = client(first, key)
    store.set("k", "v")
    first.stop()
    second = StoreServer(listen(here), key)
    with pytest.raises(StoreLost):
        store.check(["k"])
    store.close()
    second.stop()
