"""What only the network store can do wrong: addresses, keys, strangers, lost servers."""

import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import zmq

from dure.errors import StoreError, StoreLost, StoreRefused, StoreTimeout
from dure.store import JobKey, Store, TCPStore, connection, network
from dure.store.builds import Build, own_build
from dure.store.connection import Connection, dial
from dure.store.identity import host_name
from dure.store.init_method import TcpEndpoint
from dure.store.network import NetworkStore
from dure.store.server import StoreServer
from tests.store.procs.relay import Relay
from tests.waiting import until

from .conftest import TIMEOUT, client


def test_messages_name_both_builds_where_the_server_is_of_another(
    master: TCPStore, key: JobKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "own_build", lambda: Build(11, "9.8.7"))
    store = client(master, key)
    mine, theirs = f"9.8.7 (protocol 11) on {host_name()}", f"{own_build()} on {host_name()}"
    with pytest.raises(StoreTimeout) as late:
        store.wait(["never"], timedelta(0))
    monkeypatch.setattr(network, "read_reply", lambda answer: msgspec.msgpack.decode(b"\xc1"))
    with pytest.raises(StoreError) as unread:
        store.num_keys()
    for caught in (late, unread):
        assert mine in caught.value.what
        assert theirs in caught.value.what


def test_insecure_on_both_sides_works_and_warns_and_on_one_side_is_refused(
    key: JobKey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DURE_INSECURE", "1")
    with caplog.at_level(logging.WARNING, "dure.store"):
        open_to_all = TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT)
    assert "DURE_INSECURE" in caplog.text
    with closing(open_to_all), closing(client(open_to_all, None)) as other:
        other.set("k", "v")
        assert open_to_all.get("k") == b"v"
        caplog.clear()
        with pytest.raises(StoreRefused) as caught:
            client(open_to_all, key)
    assert "DURE_INSECURE" in caught.value.seen
    assert " refused " in caplog.text


def test_a_clone_keeps_the_server(master: TCPStore, server: StoreServer, key: JobKey) -> None:
    owner = NetworkStore(server.endpoint, key, TIMEOUT, server)
    for store, its in ((master, master._server), (owner, server)):
        with closing(store.clone()) as clone:
            store.close()
            assert its.is_held
            clone.set("k", "v")
        assert not its.is_held


def test_threads_that_open_one_address_share_one_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = threading.Barrier(4)

    def opens(number: int) -> Store:
        together.wait()
        if number % 2:
            return TCPStore("127.0.0.1", port, is_master=True, timeout=TIMEOUT)
        return TcpEndpoint(host="127.0.0.1", port=port).open(0, 1, TIMEOUT.total_seconds())

    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            stores = list(pool.map(opens, range(4)))
        stores[0].set("k", "v")
        assert stores[1].get("k") == b"v"
        for store in stores:
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
    with ThreadPoolExecutor(1) as pool, closing(store):
        parked = pool.submit(store.get, "never")
        store.set("k", "")
        server.stop()
        with pytest.raises(StoreLost):
            parked.result()
        with pytest.raises(StoreLost):
            store.get("k")


def test_a_write_whose_answer_was_lost_is_done_once(server: StoreServer, key: JobKey) -> None:
    """Of each connection the eighth packet, after the handshake, is an answer, and is lost."""
    with Relay(server.port, lose=8) as relay:
        with closing(NetworkStore(f"tcp://127.0.0.1:{relay.port}", key, TIMEOUT)) as store:
            assert [store.add("n", 1) for _ in range(10)] == list(range(1, 11))
        assert relay.lost > 2


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
    with ThreadPoolExecutor(1) as pool, closing(store):
        parked = pool.submit(store.get, "late")
        until(lambda: not store._idle, "the use of the first connection")
        with pytest.raises(StoreTimeout):
            store.wait(["never"], timedelta(milliseconds=50))
        store.set("late", "came")
        assert parked.result() == b"came"


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


def test_no_socket_is_made_while_another_thread_closes_the_store(
    server: StoreServer, key: JobKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyzmq would make one of memory that was freed, and ZeroMQ end the process."""
    closing, made_late = threading.Event(), threading.Event()

    class Watched(zmq.Context[zmq.Socket[bytes]]):
        def socket(self, *args: Any, **more: Any) -> zmq.Socket[bytes]:
            if closing.is_set():
                made_late.set()
            return super().socket(*args, **more)

        def term(self) -> None:
            closing.set()
            until(lambda: made_late.is_set() or looking.done(), "the thread that looks")
            super().term()

    monkeypatch.setattr(zmq, "Context", Watched)
    monkeypatch.setattr(connection, "_ATTEMPT_S", 0.02)
    store = NetworkStore(server.endpoint, key, TIMEOUT)
    store._idle.pop().close()
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        store._endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        looking = pool.submit(store.num_keys)
        silent.accept()[0].close()
        store.close()
        with pytest.raises(StoreError):
            looking.result()
    assert not made_late.is_set()


def test_a_silent_server_is_looked_for_as_long_as_a_host_may_be_silent(
    server: StoreServer, key: JobKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[float] = []

    def noted(*args: Any) -> Connection:
        patience.append(args[3])
        return dial(*args)

    with closing(NetworkStore(server.endpoint, key, TIMEOUT)) as store:
        monkeypatch.setattr(network, "dial", noted)
        monkeypatch.setenv("DURE_SILENCE", "77")
        store._idle.pop().close()
        store.set("k", "v")
    assert patience == [77]


def test_a_server_has_ended_when_nobody_listens_or_another_answers(key: JobKey, port: int) -> None:
    first = TCPStore("127.0.0.1", port, is_master=True, timeout=TIMEOUT, key=key)
    with closing(NetworkStore(first.endpoint, key, TIMEOUT)) as store:
        assert not store.server_has_ended()
        first._server.stop()
        first.close()
        assert store.server_has_ended()
        with closing(TCPStore("127.0.0.1", port, is_master=True, timeout=TIMEOUT, key=key)):
            assert not store.server_has_ended()  # as far as is known
            with pytest.raises(StoreLost):
                store.set("k", "v")
            assert store.server_has_ended()
