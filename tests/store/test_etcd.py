"""What the store in etcd asks of etcd: how many requests, and over how many connections."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dure.store import EtcdStore
from tests.store.fake_etcd import FakeEtcd, fake_etcd
from tests.waiting import PATIENCE_S

from .conftest import TIMEOUT


@pytest.fixture
def etcd() -> Iterator[FakeEtcd]:
    with fake_etcd() as it:
        yield it


@pytest.fixture
def store(etcd: FakeEtcd) -> Iterator[EtcdStore]:
    it = EtcdStore.from_url(f"etcd://{etcd.names}/job", TIMEOUT)
    yield it
    it.close()


def test_one_watch_serves_all_looks(etcd: FakeEtcd, store: EtcdStore) -> None:
    """An agent looks once a second: it must not connect, and open a watch, for each look."""
    store.set("state", "0")
    revision, _ = store.look("", -1, 0.0)
    for _ in range(20):
        revision, found = store.look("", revision, 0.001)
        assert found == {"state": b"0"}
    assert etcd.requests["watch"] == 1
    assert etcd.num_connections == 2
    with ThreadPoolExecutor(1) as pool:
        for number in range(1, 4):
            news = pool.submit(store.look, "", revision, PATIENCE_S)
            store.set("state", str(number))
            revision, found = news.result()
            assert found == {"state": b"%d" % number}
    assert etcd.requests["watch"] == 1


def test_a_long_value_is_compared_by_its_revision(etcd: FakeEtcd, store: EtcdStore) -> None:
    """A state that was read is not sent back to etcd to be compared."""
    first, second = b"1" * 1000, b"2" * 1000
    store.set("state", first)
    store.look("", -1, 0.0)
    sent: list[int] = []
    carry_out = etcd.carry_out
    etcd.carry_out = lambda path, body: (sent.append(len(str(body))), carry_out(path, body))[1]
    assert store.transact({"state": first}, {"state": second})
    assert len(sent) == 1
    assert sent[0] < 2 * 1400  # one value in base64, and some 600 bytes of the rest
    assert not store.transact({"state": first}, {"state": b""})
    assert store.get("state") == second


def test_a_watch_that_ends_is_opened_again(etcd: FakeEtcd, store: EtcdStore) -> None:
    revision, _ = store.look("", -1, 0.0)
    revision, _ = store.look("", revision, 0.001)
    (stream,) = store._watches.values()
    stream.close()
    with ThreadPoolExecutor(1) as pool:
        news = pool.submit(store.look, "", revision, PATIENCE_S)
        store.set("k", "v")
        while (found := news.result())[1] == {}:
            news = pool.submit(store.look, "", found[0], PATIENCE_S)
        assert found[1] == {"k": b"v"}
