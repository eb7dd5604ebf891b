"""What only the network store can do wrong: addresses, keys, strangers, lost servers."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from dure.errors import StoreError, StoreLost, StoreRefused, StoreTimeout
from dure.store import JobKey, TCPStore, network
from dure.store.address import is_local, resolve
from dure.store.connection import Connection, dial
from dure.store.key import mint
from dure.store.listener import listen
from dure.store.network import NetworkStore
from dure.store.server import StoreServer
from dure.store.wire import Reply, Request, pack
from waiting import PATIENCE_S, until

from .conftest import TIMEOUT


@pytest.fixture
def key() -> JobKey:
    return mint()


@pytest.fixture
def master(key: JobKey) -> Iterator[TCPStore]:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, key=key)
    yield store
    store.close()


@pytest.fixture
def server(key: JobKey) -> Iterator[StoreServer]:
    it = StoreServer(listen(resolve("127.0.0.1", 0)), key)
    yield it
    it.stop()


def client(master: TCPStore, key: JobKey | None) -> TCPStore:
    return TCPStore(master.host, master.port, timeout=TIMEOUT, key=key)


def test_port_zero_picks_a_port_on_the_given_address_only(master: TCPStore) -> None:
    assert master.port > 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", master.port)) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.2", master.port)) != 0


def test_a_taken_port_is_an_error_at_once(master: TCPStore, key: JobKey) -> None:
    with pytest.raises(StoreError) as caught:
        TCPStore("127.0.0.1", master.port, is_master=True, timeout=TIMEOUT, key=key)
    assert f"127.0.0.1:{master.port}" in caught.value.what
    assert not isinstance(caught.value, StoreTimeout)


def test_a_port_is_free_again_after_close(key: JobKey, port: int) -> None:
    for round_ in range(5):
        store = TCPStore("127.0.0.1", port, is_master=True, timeout=TIMEOUT, key=key)
        assert store.add("rounds", 1) == 1, f"round {round_} met old keys"
        store.close()


def test_nobody_there_is_a_timeout_that_names_the_address(key: JobKey) -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StoreTimeout) as caught:
            NetworkStore(f"tcp://{place}", key, timedelta(milliseconds=100))
        with pytest.raises(StoreTimeout):  # at once
            NetworkStore(f"tcp://{place}", key, timedelta(hours=1), patience_s=3600.0)
        taken.listen()  # and says nothing
        with pytest.raises(StoreTimeout):
            NetworkStore(f"tcp://{place}", key, timedelta(milliseconds=100))
    assert place in caught.value.what


def test_only_one_side_insecure_is_refused(
    master: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURE_INSECURE", "1")
    with pytest.raises(StoreRefused):
        client(master, None)


def test_a_client_with_a_key_does_not_talk_to_a_server_without(
    key: JobKey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DURE_INSECURE", "1")
    open_to_all = TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT)
    open_to_all.set("k", "v")
    caplog.clear()
    with pytest.raises(StoreRefused) as caught:
        client(open_to_all, key)
    assert "DURE_INSECURE" in caught.value.seen
    open_to_all.close()
    assert [r for r in caplog.records if " refused " in r.getMessage()]


def test_insecure_on_both_sides_works_and_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DURE_INSECURE", "1")
    with caplog.at_level(logging.WARNING, "dure.store"):
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT)
    assert caplog.records
    other = client(store, None)
    other.set("k", "v")
    assert store.get("k") == b"v"
    other.close()
    store.close()


def test_a_number_out_of_range_is_an_error(master: TCPStore) -> None:
    with pytest.raises(StoreError):
        master.add("n", 2**70)
    assert master.add("n", 2**62) == 2**62
    with pytest.raises(StoreError):
        master.add("n", 2**62)
    assert master.get("n") == str(2**62).encode()
    assert master.add("m", 1) == 1


def test_a_lost_server_is_noticed_at_once_and_again(server: StoreServer, key: JobKey) -> None:
    store = NetworkStore(server.endpoint, key, TIMEOUT)
    with ThreadPoolExecutor(1) as pool:
        parked = pool.submit(store.get, "never")
        store.set("k", "")
        server.stop()
        with pytest.raises(StoreLost):
            parked.result()
    with pytest.raises(StoreLost):
        store.get("k")
    store.close()


def test_a_server_lost_just_before_a_request_is_noticed(server: StoreServer, key: JobKey) -> None:
    with zmq.Context() as context:
        connection = dial(context, server.endpoint, key, PATIENCE_S)
        server.stop()
        with pytest.raises(StoreLost):
            connection.call(pack(Request("get", ("k",))), time.monotonic() + PATIENCE_S)
        connection.close()


def test_a_busy_server_is_not_a_lost_one(
    server: StoreServer, key: JobKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second thread's connection takes longer than that thread's call would wait for a key."""

    def slow(*args: Any) -> Connection:
        if args[3] <= 0.2:
            raise StoreTimeout("the server has not answered yet", elapsed_s=args[3])
        return dial(*args)

    store = NetworkStore(server.endpoint, key, TIMEOUT)
    monkeypatch.setattr(network, "dial", slow)
    with ThreadPoolExecutor(1) as pool:
        parked = pool.submit(store.get, "late")
        until(lambda: not store._idle, "the use of the first connection")
        with pytest.raises(StoreTimeout):
            store.wait(["never"], timedelta(milliseconds=50))
        store.set("late", "came")
        assert parked.result() == b"came"
    store.close()


def test_close_ends_the_calls_of_other_threads(master: TCPStore, key: JobKey) -> None:
    other = client(master, key)
    inside = threading.Event()

    def parked() -> bytes:
        other.set("there", "")
        inside.set()
        return other.get("never")

    with ThreadPoolExecutor(1) as pool:
        value = pool.submit(parked)
        inside.wait()
        other.close()
        with pytest.raises(StoreError):
            value.result()
    with pytest.raises(StoreError):
        other.get("k")


def test_a_retired_server_serves_those_who_are_left(key: JobKey) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, key=key)
    late = client(store, key)
    store.set("k", "v")
    store.close()
    assert late.get("k") == b"v"
    late.close()


def test_the_master_waits_for_its_workers(key: JobKey, port: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        master = pool.submit(TCPStore, "127.0.0.1", port, 2, True, TIMEOUT, key=key)
        worker = TCPStore("127.0.0.1", port, world_size=2, timeout=TIMEOUT, key=key)
        master.result().close()
        worker.close()
    with pytest.raises(StoreTimeout):
        TCPStore("127.0.0.1", 0, 2, True, timedelta(milliseconds=50), key=key)


def test_names_and_ports_are_checked() -> None:
    with pytest.raises(StoreError):
        resolve("no-such-host.invalid", 1)
    with pytest.raises(StoreError):
        resolve("127.0.0.1", 65536)
    assert is_local("127.0.0.1")
    assert is_local("localhost")
    assert not is_local("192.0.2.1")


class Busy:
    """A socket that has room for a reply only after it was made to look."""

    def __init__(self) -> None:
        self.looked = False
        self.sent: list[tuple[bytes, ...]] = []

    def send_multipart(self, message: tuple[bytes, ...], flags: int) -> None:
        if not self.looked:
            raise zmq.Again
        self.sent.append(message)

    def get(self, option: int) -> int:
        self.looked = True
        return 0


def test_a_reply_is_not_given_up_before_zeromq_has_looked_what_was_read() -> None:
    server = SimpleNamespace(_router=(router := Busy()))
    StoreServer._send(cast(StoreServer, server), [(b"client", Reply("ok"))])
    assert len(router.sent) == 1
