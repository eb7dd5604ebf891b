"""The network store's server: its port, its end, and replies that find no room."""

import contextlib
import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import pytest
import zmq

from dure.errors import StoreError, StoreTimeout
from dure.store import JobKey, TCPStore
from dure.store.network import NetworkStore
from dure.store.server import StoreServer
from dure.store.wire import Reply
from tests.waiting import until

from .conftest import TIMEOUT


def test_port_zero_picks_a_port_on_the_given_address_only(master: TCPStore) -> None:
    assert master.port > 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", master.port)) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.2", master.port)) != 0


def test_a_taken_port_is_an_error_at_once(key: JobKey) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(StoreError) as caught:
            TCPStore("127.0.0.1", taken, is_master=True, timeout=TIMEOUT, key=key)
    assert f"127.0.0.1:{taken}" in caught.value.what
    assert not isinstance(caught.value, StoreTimeout)


def test_a_port_is_free_again_after_close(key: JobKey, port: int) -> None:
    for round_ in range(5):
        store = TCPStore("127.0.0.1", port, is_master=True, timeout=TIMEOUT, key=key)
        assert store.add("rounds", 1) == 1, f"round {round_} met old keys"
        store.close()


def test_masters_at_one_address_share_a_server_until_the_last_closes(master: TCPStore) -> None:
    def another() -> TCPStore:
        at, key = master.port, master.key
        return TCPStore("127.0.0.1", at, 1, is_master=True, timeout=TIMEOUT, key=key)

    masters = [master, another()]
    masters[0].set("k", "v")
    for first in range(2):
        masters[first].close()
        masters.append(another())
        assert [store.get("k") for store in masters[first + 1 :]] == [b"v", b"v"]
    for store in masters:
        store.close()
    again = another()
    assert not again.check(["k"])
    again.close()


def test_a_server_without_clients_stays_until_the_last_store_lets_it_end(
    server: StoreServer,
) -> None:
    assert server.hold()  # by a second store, which has not connected yet
    server.release()
    assert server.is_held
    server.release()
    until(lambda: not server._thread.is_alive(), "the server's end")


def test_a_master_takes_back_a_server_whose_clients_stay(key: JobKey, port: int) -> None:
    """One of them may be of a rank that has opened the store again already."""
    master = TCPStore("127.0.0.1", port, is_master=True, timeout=TIMEOUT, key=key)
    early = TCPStore("127.0.0.1", port, timeout=TIMEOUT, key=key)
    early.set("came", "yes")
    master.close()
    again = TCPStore("127.0.0.1", port, is_master=True, timeout=TIMEOUT, key=key)
    assert again.get("came") == b"yes"
    early.close()
    again.close()


def test_stores_that_a_rank_opens_in_turn_do_not_make_the_masters_meeting(
    key: JobKey, port: int
) -> None:
    def opened(is_master: bool) -> TCPStore:
        return TCPStore("127.0.0.1", port, 2, is_master, TIMEOUT, key=key)

    first = TCPStore("127.0.0.1", port, is_master=True, timeout=TIMEOUT, key=key)
    ahead = [opened(False), opened(False)]
    for store in (opened(True), opened(True), *ahead, first):
        store.close()
    with pytest.raises(StoreTimeout):
        TCPStore("127.0.0.1", 0, 2, True, timedelta(milliseconds=50), key=key)


def test_a_released_server_ends_with_its_last_client_and_not_before(
    server: StoreServer, key: JobKey
) -> None:
    with contextlib.closing(NetworkStore(server.endpoint, key, TIMEOUT)) as store:
        store.set("k", "v")
        server.release()
        assert not server._has_ended()
        assert store.get("k") == b"v"
    until(lambda: not server._thread.is_alive(), "the server to end")
    assert not server.hold()


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


def test_num_keys_counts_one_key_of_the_meeting_and_list_keys_none_as_in_torch(
    key: JobKey, port: int
) -> None:
    store = TCPStore("127.0.0.1", port, 1, is_master=True, timeout=TIMEOUT, key=key)
    for number in range(5):
        store.set(f"k{number}", "v")
    assert store.num_keys() == 6
    assert store.list_keys() == [f"k{number}" for number in range(5)]
    store.close()
