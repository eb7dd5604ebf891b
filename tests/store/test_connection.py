"""One connection to a server: nobody is there, somebody who says nothing, one who has just gone."""

import ctypes
import socket
import threading
import time
from datetime import timedelta

import pytest
import zmq

from dure.errors import StoreLost, StoreTimeout
from dure.store import JobKey, connection, router
from dure.store.address import is_refused, why_unreachable
from dure.store.connection import dial
from dure.store.network import NetworkStore
from dure.store.server import StoreServer
from dure.store.wire import Request, pack
from tests.waiting import PATIENCE_S

CLONE_NEWNET = 0x40000000


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


def test_a_server_lost_just_before_a_request_is_noticed(server: StoreServer, key: JobKey) -> None:
    with zmq.Context() as context:
        connection = dial(context, server.endpoint, key, PATIENCE_S)
        server.stop()
        with pytest.raises(StoreLost):
            connection.call(pack(Request("get", ("k",))), time.monotonic() + PATIENCE_S)
        connection.close()


def test_a_server_that_says_nothing_is_tried_again_before_it_would_hang_up(monkeypatch) -> None:
    """A busy server ends handshakes itself at last, which must not be taken for a refusal."""
    assert connection._ATTEMPT_S < router.HANDSHAKE_S
    monkeypatch.setattr(connection, "_ATTEMPT_S", 0.02)
    with zmq.Context() as context, socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreTimeout):
            dial(context, endpoint, None, 0.5, 0.0)
        silent.setblocking(False)
        for _ in range(2):
            silent.accept()[0].close()


def test_a_host_refuses_connections_where_nobody_listens_any_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        endpoint = f"tcp://127.0.0.1:{there.getsockname()[1]}"
        assert not is_refused(endpoint)  # though nobody accepts it
    assert is_refused(endpoint)
    assert not is_refused("ipc://@nothing")
    assert not is_refused("tcp://no.such.name.invalid:1")


def without_networks(key: JobKey, found: list[object]) -> None:
    """Look for a server in a network namespace, which is this thread's, with `lo` down."""
    assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0, ctypes.get_errno()
    for host in ("127.0.0.1", "10.0.0.1"):
        endpoint = f"tcp://{host}:29500"
        found.append(why_unreachable(endpoint))
        limit_s = 3600.0 if host == "127.0.0.1" else 0.1  # another network may come up
        with zmq.Context() as context:
            try:
                dial(context, endpoint, key, limit_s)
            except StoreTimeout as error:
                found.append(error)


@pytest.mark.needs("root")
def test_loopback_interface_that_is_down_is_reported_at_once(key: JobKey) -> None:
    found: list[object] = []
    thread = threading.Thread(target=without_networks, args=(key, found))
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    here, no_loopback, there, no_network = found
    assert here == there == "network is unreachable"
    assert isinstance(no_loopback, StoreTimeout) and no_loopback.seen == here
    assert "ip link set lo up" in no_loopback.fix
    assert isinstance(no_network, StoreTimeout) and no_network.seen == here
    assert "MASTER_ADDR" in no_network.fix


def test_reason_is_known_only_where_the_system_refuses_to_send() -> None:
    assert why_unreachable("tcp://127.0.0.1:1") == ""
    assert why_unreachable("tcp://255.255.255.255:1") == ""  # it is not allowed, that is all
    for no_address in ("tcp://a.name:1", "ipc:///tmp/x", "tcp://127.0.0.1:port"):
        assert why_unreachable(no_address) == ""
