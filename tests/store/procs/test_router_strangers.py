"""Strangers and rogue members at the store's server: nothing gets in, and the job goes on."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from dure.errors import StoreRefused
from dure.store import JobKey, router
from dure.store.address import resolve
from dure.store.key import mint
from dure.store.listener import Listener, listen
from dure.store.network import NetworkStore
from dure.store.server import StoreServer
from dure.store.wire import StoreRequest, pack
from tests.store.conftest import TIMEOUT
from tests.store.procs.relay import Relay
from tests.store.procs.wire_tools import (
    JUNK,
    connect,
    frame_header,
    greeting,
    is_closed,
    member,
    new_source,
    peer,
)
from tests.waiting import PATIENCE_S, until

TWO_GB = 2 << 30
Refused = Callable[[], str]


@pytest.fixture
def server(key: JobKey, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    """A server that a genuine client uses before and after the test, and a newcomer after it."""
    monkeypatch.setattr(router, "HANDSHAKE_S", 1.0)
    monkeypatch.setattr(router, "QUIET_S", 0.0)
    it = StoreServer(listen(resolve("127.0.0.1", 0)), key)
    with contextlib.closing(NetworkStore(it.endpoint, key, TIMEOUT)) as genuine:
        genuine.set("k", "v")
        yield it
        assert genuine.get("k") == b"v"
        with contextlib.closing(NetworkStore(it.endpoint, key, TIMEOUT)) as newcomer:
            assert newcomer.get("k") == b"v"
    it.stop()


@pytest.fixture
def refused(server: StoreServer, caplog: pytest.LogCaptureFixture) -> Refused:
    """Return the first line about a refusal, when there is one."""
    caplog.set_level(logging.WARNING, "dure.store")
    return lambda: until(lambda: caplog.messages, "a line about a refusal")[0]


def test_a_port_scan_is_reported(server: StoreServer, refused: Refused) -> None:
    for _ in range(50):
        connect(server.port).close()
    assert "left in the middle of the handshake" in refused()


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk[:12]))
def test_bytes_that_are_not_ours_end_the_connection(
    junk: bytes, server: StoreServer, refused: Refused
) -> None:
    with connect(server.port) as stranger:
        stranger.sendall(junk)
        with contextlib.suppress(OSError):  # it may be over already
            stranger.shutdown(socket.SHUT_WR)
        assert is_closed(stranger)
    refused()


@pytest.mark.parametrize("timed", [False, True])
def test_a_replayed_session_is_refused(timed: bool, server: StoreServer, key: JobKey) -> None:
    """Also if each step of the handshake is sent when the server has answered the one before."""
    hello = 64 + 2 + 200
    with Relay(server.port, source=new_source()) as proxy:
        through = f"tcp://127.0.0.1:{proxy.port}"
        with contextlib.closing(NetworkStore(through, key, TIMEOUT)) as genuine:
            assert genuine.add("replayed", 1) == 1
    assert len(proxy.recorded) > 500
    answered = (proxy.recorded[:64], proxy.recorded[64:hello]) if timed else ()
    with connect(server.port) as stranger:
        for part in answered:
            stranger.sendall(part)
            assert stranger.recv(65536)
        stranger.sendall(proxy.recorded[sum(map(len, answered)) :])
        assert is_closed(stranger)
    with contextlib.closing(NetworkStore(server.endpoint, key, TIMEOUT)) as genuine:
        assert genuine.add("replayed", 1) == 2


def test_another_key_is_refused_after_a_few_attempts(
    server: StoreServer, refused: Refused, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StoreRefused):
        NetworkStore(server.endpoint, mint(), TIMEOUT)
    assert "another job key" in refused()
    until(lambda: len(caplog.messages) == 4, "four attempts", limit_s=30)


@pytest.mark.parametrize("mechanism", ["CURVE", "NULL", "PLAIN"])
def test_a_peer_without_the_clients_key_is_refused(
    mechanism: str, server: StoreServer, key: JobKey, refused: Refused
) -> None:
    """Also one that knows the server's public key."""
    public, own = key.pair("store server").public, mint().pair("store client")
    keys = (public, own) if mechanism == "CURVE" else (None, None)
    with peer(server.port, new_source(), *keys, plain=mechanism == "PLAIN") as stranger:
        stranger.send(pack(StoreRequest("list")), zmq.NOBLOCK)
        reason = refused()
        assert mechanism != "CURVE" or "another job key" in reason
        assert not stranger.poll(0)


def test_a_handshake_that_is_held_open_ends(server: StoreServer, refused: Refused) -> None:
    with connect(server.port) as stranger:
        stranger.sendall(greeting())
        assert is_closed(stranger, 20.0)  # ZeroMQ's own limit is 30 s
    assert "did not complete" in refused()


def test_a_frame_of_2_gb_before_the_handshake_is_cut_off_at_its_header(
    server: StoreServer, refused: Refused
) -> None:
    with connect(server.port) as stranger:
        stranger.sendall(greeting() + frame_header(TWO_GB, command=True))
        with pytest.raises(OSError):  # it is over before all of this is sent
            stranger.sendall(bytes(64 << 20))
        assert is_closed(stranger)
    assert "in the middle" not in refused()


def test_a_frame_of_2_gb_after_the_handshake_is_cut_off_at_its_header(
    server: StoreServer, key: JobKey
) -> None:
    with Relay(server.port, source=new_source()) as proxy:
        genuine = NetworkStore(f"tcp://127.0.0.1:{proxy.port}", key, TIMEOUT)
        proxy.server.sendall(frame_header(TWO_GB, command=False))
        assert proxy.server_hung_up.wait(PATIENCE_S)
        genuine.close()


def test_a_request_that_is_played_back_within_its_session_is_not_carried_out(
    server: StoreServer, key: JobKey
) -> None:
    with Relay(server.port, source=new_source()) as proxy:
        genuine = NetworkStore(f"tcp://127.0.0.1:{proxy.port}", key, TIMEOUT)
        before = len(proxy.recorded)
        assert genuine.add("played back", 1) == 1
        request = proxy.recorded[before:]
        assert b"MESSAGE" in request
        proxy.server.sendall(request)
        proxy.server.sendall(request[:-1] + bytes([request[-1] ^ 1]))
        genuine.close()
    with contextlib.closing(NetworkStore(server.endpoint, key, TIMEOUT)) as keeper:
        assert keeper.add("played back", 1) == 2


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\x91" * 50_000,  # nested 50,000 deep
        msgspec.msgpack.encode(["kill"]),
        msgspec.msgpack.encode(["wait", ["k"], [], 0, float("nan")]),
        msgspec.msgpack.encode(["set", ["k"] * 3, [b""]]),
        msgspec.msgpack.encode(["add", ["k"], [], 2**64 - 1]),
    ],
    ids=lambda message: repr(message[:12]),
)
def test_malformed_requests_of_a_member_are_refused(
    message: bytes, server: StoreServer, key: JobKey
) -> None:
    with member(server.port, new_source(), key) as rogue:
        rogue.send(message)
        assert msgspec.msgpack.decode(rogue.recv())[0] == "error"
        rogue.send(pack(StoreRequest("check")))
        assert msgspec.msgpack.decode(rogue.recv())[0] == "ok"


STRANGER = """
import os, socket, sys
user, name = int(sys.argv[1]), sys.argv[2]
os.setresuid(user, user, user)
with socket.socket(socket.AF_UNIX) as stranger:
    stranger.connect("\\0" + name)
    print(len(stranger.recv(10)))
"""


@pytest.mark.parametrize(
    ("user", "heard"), [(os.getuid(), 10), pytest.param(65534, 0, marks=pytest.mark.needs("root"))]
)
def test_another_user_does_not_hear_a_word_of_a_unix_socket(user: int, heard: int) -> None:
    """Every user of a machine can see the abstract namespace."""
    name = f"dure-test-{uuid.uuid4().hex}"
    server = StoreServer(Listener(endpoint=f"ipc://@{name}"), mint())
    words = [sys.executable, "-c", STRANGER, str(user), name]
    done = subprocess.run(words, capture_output=True, check=True, timeout=PATIENCE_S)
    server.stop()
    assert int(done.stdout) == heard
