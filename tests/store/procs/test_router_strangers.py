"""Strangers and rogue members at the store's server: nothing gets in, and the job goes on.

Each test attacks a server in a process of its own while a genuine client works; see `victim`.
"""

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta

import msgspec
import pytest
import zmq

from dure.errors import StoreRefused
from dure.store import TCPStore
from dure.store.key import mint
from dure.store.wire import Request, pack
from tests.store.procs.victim import Victim, victim
from tests.store.procs.wire_tools import (
    JUNK,
    Proxy,
    connect,
    frame_header,
    greeting,
    is_closed,
    member,
    new_source,
    peer,
)
from tests.waiting import PATIENCE_S

TWO_GB = 2 << 30
TIMEOUT = timedelta(seconds=PATIENCE_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    brief = {"HANDSHAKE_S": 2.0, "QUIET_S": 0.05}
    with victim(tmp_path_factory.mktemp("victim"), brief) as it:
        yield it


def test_a_port_scan_is_counted(server: Victim) -> None:
    source = new_source()
    with server.under_attack():
        for _ in range(50):
            connect(server.port, source).close()
    assert "left in the middle of the handshake" in server.refused(50)


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk[:12]))
def test_bytes_that_are_not_ours_end_the_connection(junk: bytes, server: Victim) -> None:
    with server.under_attack(), connect(server.port) as stranger:
        stranger.sendall(junk)
        with contextlib.suppress(OSError):  # it may be over already
            stranger.shutdown(socket.SHUT_WR)
        assert is_closed(stranger)
    server.refused(1)


@pytest.mark.parametrize("timed", [False, True])
def test_a_replayed_session_is_refused(timed: bool, server: Victim) -> None:
    """Also if each step of the handshake is sent when the server has answered the one before."""
    name, hello = f"replayed {timed}", 64 + 2 + 200
    with Proxy(server.port, new_source()) as proxy:
        genuine = TCPStore("127.0.0.1", proxy.port, timeout=TIMEOUT, key=server.key)
        assert genuine.add(name, 1) == 1
        genuine.close()
    assert len(proxy.recorded) > 500
    answered = (proxy.recorded[:64], proxy.recorded[64:hello]) if timed else ()
    with server.under_attack(), connect(server.port) as stranger:
        for part in answered:
            stranger.sendall(part)
            assert stranger.recv(65536)
        stranger.sendall(proxy.recorded[sum(map(len, answered)) :])
        assert is_closed(stranger)
    server.refused(1)
    genuine = server.client()
    assert genuine.add(name, 1) == 2
    genuine.close()


def test_another_key_is_refused_on_both_sides(server: Victim) -> None:
    with server.under_attack(), pytest.raises(StoreRefused):
        TCPStore("127.0.0.1", server.port, timeout=TIMEOUT, key=mint())
    server.refused(4)  # a client tries so often


def test_the_servers_public_key_alone_opens_nothing(server: Victim) -> None:
    public = server.key.pair("store server").public
    with (
        server.under_attack(),
        peer(server.port, new_source(), public, mint().pair("store client")) as stranger,
    ):
        stranger.send(pack(Request("list")), zmq.NOBLOCK)
        assert "another job key" in server.refused(1)
        assert not stranger.poll(0)


@pytest.mark.parametrize("plain", [False, True], ids=["NULL", "PLAIN"])
def test_other_mechanisms_are_refused(plain: bool, server: Victim) -> None:
    with server.under_attack(), peer(server.port, new_source(), plain=plain) as stranger:
        stranger.send(pack(Request("list")), zmq.NOBLOCK)
        server.refused(1)
        assert not stranger.poll(0)


def test_a_handshake_that_is_held_open_ends(server: Victim) -> None:
    with server.under_attack(), connect(server.port) as stranger:
        stranger.sendall(greeting())
        assert is_closed(stranger)
    assert "did not complete" in server.refused(1)


def test_a_frame_of_2_gb_before_the_handshake_is_cut_off_at_its_header(server: Victim) -> None:
    with server.under_attack(), connect(server.port) as stranger:
        stranger.sendall(greeting() + frame_header(TWO_GB, command=True))
        with pytest.raises(OSError):  # it is over before all of this is sent
            stranger.sendall(bytes(64 << 20))
        assert is_closed(stranger)
    assert "in the middle" not in server.refused(1)


def test_a_frame_of_2_gb_after_the_handshake_is_cut_off_at_its_header(server: Victim) -> None:
    with server.under_attack(), Proxy(server.port, new_source()) as proxy:
        genuine = TCPStore("127.0.0.1", proxy.port, timeout=TIMEOUT, key=server.key)
        proxy.server.sendall(frame_header(TWO_GB, command=False))
        assert proxy.server_hung_up.wait(PATIENCE_S)
        genuine.close()


def test_a_request_that_is_played_back_within_its_session_is_not_carried_out(
    server: Victim,
) -> None:
    with server.under_attack(), Proxy(server.port, new_source()) as proxy:
        genuine = TCPStore("127.0.0.1", proxy.port, timeout=TIMEOUT, key=server.key)
        before = len(proxy.recorded)
        assert genuine.add("played back", 1) == 1
        request = proxy.recorded[before:]
        assert b"MESSAGE" in request
        proxy.server.sendall(request)
        proxy.server.sendall(request[:-1] + bytes([request[-1] ^ 1]))
        proxy.server.sendall(b"\x00\x05hello")
        genuine.close()
    keeper = server.client()
    assert keeper.add("played back", 1) == 2
    keeper.close()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        b"\x95\xa3set",
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\x92\xa3set\xdb\xff\xff\xff\xff",  # a text of 4 GB
        b"\x91" * 50_000,  # nested 50,000 deep
        msgspec.msgpack.encode(["kill"]),
        msgspec.msgpack.encode(["wait", ["k"], [], 0, float("inf")]),
        msgspec.msgpack.encode(["wait", ["k"], [], 0, float("nan")]),
        msgspec.msgpack.encode(["wait", ["k"], [], 0, -1.0]),
        msgspec.msgpack.encode(["set", ["k"] * 3, [b""]]),
        msgspec.msgpack.encode(["add", ["k"], [], 2**64 - 1]),
    ],
    ids=lambda message: repr(message[:12]),
)
def test_malformed_requests_of_a_member_are_refused(message: bytes, server: Victim) -> None:
    with server.under_attack(), member(server.port, new_source(), server.key) as rogue:
        rogue.send(message)
        assert msgspec.msgpack.decode(rogue.recv())[0] == "error"
        rogue.send(pack(Request("check")))
        assert msgspec.msgpack.decode(rogue.recv())[0] == "ok"
