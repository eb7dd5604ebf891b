"""Frames of messages: what was cut is put together again, and nothing else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import zmq

from dure.rpc import sockets
from dure.rpc.sockets import Assembly, SocketReceiver, Sockets, frames_of
from dure.store.address import is_refused, resolve
from dure.store.listener import listen
from dure.store.silence import ListeningClock
from dure.store.wire import MAX_FRAME_BYTES
from tests.waiting import PATIENCE_S, until


def some(nbytes: int) -> bytes:
    return bytes(i * 37 % 251 for i in range(nbytes))


@pytest.mark.parametrize("body", [0, 1, MAX_FRAME_BYTES - 20, MAX_FRAME_BYTES, 200_001])
@pytest.mark.parametrize(
    "memories", [[], [0], [5000], [MAX_FRAME_BYTES], [0, 150_000, 0, MAX_FRAME_BYTES + 1, 1]]
)
def test_what_was_cut_is_put_together(body: int, memories: list[int]) -> None:
    sent = [some(n) for n in memories]
    assembly = Assembly()
    for _ in range(2):  # the second begins where the first has ended
        *first, last = (bytes(frame) for frame in frames_of(some(body), sent))
        assert max(map(len, (*first, last))) <= MAX_FRAME_BYTES
        assert [assembly.take(frame) for frame in first] == [None] * len(first)
        whole = assembly.take(last)
        assert whole is not None
        assert bytes(whole[0]) == some(body)
        assert [memory.dtype for memory in whole[1]] == [torch.uint8] * len(memories)
        assert [memory.numpy().tobytes() for memory in whole[1]] == sent


def test_frames_that_continue_nothing_are_refused() -> None:
    long = [bytes(frame) for frame in frames_of(b"", [some(100_000)])]
    assert len(long) == 3
    with pytest.raises(ValueError):
        Assembly().take(long[1])
    with pytest.raises(ValueError):
        Assembly().take(b"")
    with pytest.raises(ValueError):
        Assembly().take(b"\x0b" + bytes(7) + b"not msgpack")
    for wrong in (b"", some(MAX_FRAME_BYTES)):  # no memory has none left, or so much
        assembly = Assembly()
        assert assembly.take(long[0]) is None
        assert assembly.take(long[1]) is None
        with pytest.raises(ValueError):
            assembly.take(wrong)


class Lost(SocketReceiver):
    """Notes which processes cannot be reached."""

    def __init__(self) -> None:
        self.peers: list[int] = []

    def message(self, sender: int, body: bytes, memories: list[torch.Tensor]) -> None:
        raise AssertionError("nobody sends anything")

    def broken(self, peer: int) -> None:
        raise AssertionError("no connection was open")

    def unreachable(self, peer: int) -> None:
        self.peers.append(peer)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sockets]:
    """Sockets that look for others for as long as a host may be silent."""
    monkeypatch.setenv("DURE_SILENCE", "3600")
    monkeypatch.setattr(sockets, "_REFUSED_S", 0.0)
    made = Sockets(listen(resolve("127.0.0.1", 0)), None, "world")
    yield made
    made.close()


def test_a_process_of_another_host_is_not_looked_for_where_nobody_listens(opened: Sockets) -> None:
    lost = Lost()
    opened.start(0, lost)
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
    opened.send(1, f"tcp://127.0.0.1:{port}", False, b"", ())
    until(lambda: lost.peers == [1], "a process that is found to be gone")


def test_a_process_of_another_host_that_is_busy_is_looked_for_as_long_as_hosts_may_be_silent(
    opened: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def ask(endpoint: str) -> bool:
        asked.set()
        return is_refused(endpoint)

    monkeypatch.setattr(sockets, "is_refused", ask)
    lost = Lost()
    opened.start(0, lost)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        busy.settimeout(PATIENCE_S)
        opened.send(1, f"tcp://127.0.0.1:{busy.getsockname()[1]}", False, b"", ())
        busy.accept()[0].close()  # so that another attempt is made
        assert asked.wait(PATIENCE_S)
        busy.accept()[0].close()
        busy.accept()[0].close()
        assert lost.peers == []
    (way,) = opened._connections.values()
    assert opened._patience_s(way) == 3600


def test_processes_are_looked_for_again_after_a_pause_of_this_one(opened: Sockets) -> None:
    late, lost = [0.0], Lost()
    opened._clock = ListeningClock(lambda: time.monotonic() + late[0])
    opened.start(0, lost)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        busy.settimeout(PATIENCE_S)
        opened.send(1, f"tcp://127.0.0.1:{busy.getsockname()[1]}", False, b"", ())
        busy.accept()[0].close()
        late[0] = 2 * 3600.0  # so long this process is paused, more than another may be silent
        for _ in range(3):
            busy.accept()[0].close()
        assert lost.peers == []


# --- a connection that breaks while an answer is on its way back ----------------------------------


class Noted(SocketReceiver):
    """Notes what is reported, in order."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def message(self, sender: int, body: bytes, memories: list[torch.Tensor]) -> None:
        self.events.append(bytes(body))

    def broken(self, peer: int) -> None:
        self.events.append("broken")

    def unreachable(self, peer: int) -> None:
        self.events.append("unreachable")


class Peer:
    """Process 1, on another host: the test decides when it reads, sends and closes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], to: Sockets, noted: Noted) -> None:
        self._to, self._noted = to, noted
        self._router = context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.linger = 1000 * PATIENCE_S
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        to.send(1, f"tcp://127.0.0.1:{port}", False, b"call", ())
        assert self._router.poll(1000 * PATIENCE_S), "the call did not come"

    def greet(self) -> None:
        self._dealer.connect(self._to.endpoint)
        self._dealer.send(sockets._HELLO + sockets._pack(sockets._Hello("world", 1)))
        self.answer(b"first")
        until(lambda: self._noted.events == [b"first"], "the first answer")

    def answer(self, body: bytes) -> None:
        for frame in frames_of(body, ()):
            self._dealer.send(frame)

    def close_what_leads_to_it(self) -> None:
        self._router.close()
        (way,) = self._to._connections.values()
        until(lambda: not way.open, "a connection that is seen to break")

    def close(self) -> None:
        self._router.close()
        self._dealer.close()


@pytest.fixture
def noted() -> Noted:
    return Noted()


@pytest.fixture
def peer(opened: Sockets, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    monkeypatch.setattr(sockets, "_FINISH_S", 2.0 * PATIENCE_S)
    opened.start(0, noted)
    with zmq.Context[zmq.Socket[bytes]]() as context:
        made = Peer(context, opened, noted)
        yield made
        made.close()


def test_an_answer_is_read_before_the_break_of_the_connection_that_led_to_its_sender(
    peer: Peer, noted: Noted
) -> None:
    peer.greet()
    peer.close_what_leads_to_it()
    peer.answer(b"last")
    peer.close()
    until(lambda: "broken" in noted.events, "a report of the break")
    assert noted.events[:3] == [b"first", b"last", "broken"]


def test_the_first_answer_of_a_peer_that_leaves_is_read_before_the_break(
    opened: Sockets, peer: Peer, noted: Noted
) -> None:
    port = int(opened.endpoint.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)):
        until(lambda: opened._guarded.num_joining > 0, "a connection that may be the peer's")
        peer.close_what_leads_to_it()
        peer._dealer.connect(opened.endpoint)
        peer._dealer.send(sockets._HELLO + sockets._pack(sockets._Hello("world", 1)))
        peer.answer(b"only")
        until(lambda: b"only" in noted.events, "the answer")
    peer.close()
    until(lambda: "broken" in noted.events, "a report of the break")
    assert noted.events[:2] == [b"only", "broken"]


def test_a_peer_that_has_died_is_reported_without_waiting(peer: Peer, noted: Noted) -> None:
    peer.greet()
    peer.close()
    until(lambda: "broken" in noted.events, "a report of the break, before the limit")


def test_a_connection_that_broke_alone_is_reported_at_the_limit_and_drops_what_waits(
    opened: Sockets, peer: Peer, noted: Noted
) -> None:
    peer.greet()
    peer.close_what_leads_to_it()
    (way,) = opened._connections.values()
    opened.send(1, way.endpoint, False, b"sent into the break", ())
    opened._post(lambda: opened._broken.update({way: 0.0}))
    until(lambda: "broken" in noted.events, "a report of the break")
    assert noted.events[:2] == [b"first", "broken"]
    assert not way.queue
