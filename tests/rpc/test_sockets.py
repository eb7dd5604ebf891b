"""Frames of messages: what was cut is put together again, and nothing else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
import zmq

from dure.rpc import sockets
from dure.rpc.sockets import Assembly, Sockets, frames_of
from dure.store.address import resolve
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


class Noted:
    """Notes what is reported, in order."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def receive(self, body: bytes, memories: Sequence[torch.Tensor], sender: int) -> None:
        self.events.append(bytes(body))

    def unreachable(self, peer: int) -> None:
        self.events.append("unreachable")


@pytest.fixture
def noted() -> Noted:
    return Noted()


def started(noted: Noted, unreachable_s: float) -> Sockets:
    made = Sockets(listen(resolve("127.0.0.1", 0)), None, "world", unreachable_s)
    made.start(0, noted.receive, noted.unreachable)
    return made


@pytest.fixture
def opened(noted: Noted) -> Iterator[Sockets]:
    """Sockets of process 0, which look for others without end."""
    made = started(noted, 3600.0)
    yield made
    made.close()


def test_a_process_of_another_host_that_does_not_answer_is_unreachable(noted: Noted) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
    made = started(noted, 0.2)
    try:
        made.send(1, f"tcp://127.0.0.1:{port}", False, b"", ())
        until(lambda: noted.events == ["unreachable"], "a process that is found to be gone")
    finally:
        made.close()


def test_processes_are_looked_for_again_after_a_pause_of_this_one(
    opened: Sockets, noted: Noted
) -> None:
    late = [0.0]
    opened._clock = ListeningClock(lambda: time.monotonic() + late[0])
    with socket.create_server(("127.0.0.1", 0)) as busy:
        busy.settimeout(PATIENCE_S)
        opened.send(1, f"tcp://127.0.0.1:{busy.getsockname()[1]}", False, b"", ())
        busy.accept()[0].close()
        late[0] = 2 * 3600.0  # so long this process is paused, more than another may be silent
        for _ in range(3):
            busy.accept()[0].close()
        assert noted.events == []


# --- a connection that breaks while an answer is on its way back ----------------------------------


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
def peer(opened: Sockets, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    monkeypatch.setattr(sockets, "_FINISH_S", 2.0 * PATIENCE_S)
    with zmq.Context[zmq.Socket[bytes]]() as context:
        made = Peer(context, opened, noted)
        yield made
        made.close()


def end_the_wait(opened: Sockets) -> None:
    """Let the time be over after which a break is reported."""
    until(lambda: opened._broken, "a break")
    opened._post(lambda: opened._broken.update({1: 0.0}))


def test_an_answer_is_read_before_the_report_that_the_connection_to_its_sender_broke(
    opened: Sockets, peer: Peer, noted: Noted
) -> None:
    peer.greet()
    peer.close_what_leads_to_it()
    peer.answer(b"last")
    until(lambda: b"last" in noted.events, "the last answer")
    (way,) = opened._connections.values()
    opened.send(1, way.endpoint, False, b"sent into the break", ())
    end_the_wait(opened)
    until(lambda: len(noted.events) > 2, "a report of the break")
    assert noted.events == [b"first", b"last", "unreachable"]
    assert not way.open  # it is not opened again


def test_the_end_of_the_connection_from_a_peer_is_a_break(
    opened: Sockets, peer: Peer, noted: Noted
) -> None:
    peer.greet()
    peer._dealer.close()
    end_the_wait(opened)
    until(lambda: len(noted.events) > 1, "a report of the break")
    assert noted.events == [b"first", "unreachable"]


def test_the_break_of_a_peer_that_is_known_to_be_gone_is_not_reported(
    opened: Sockets, peer: Peer, noted: Noted
) -> None:
    peer.greet()
    gone = threading.Event()
    opened.finish(1, gone.set)
    peer.close()
    assert gone.wait(PATIENCE_S)
    opened.forget(1)
    until(lambda: not opened._connections, "the connection to be forgotten")
    assert (noted.events, opened._broken) == ([b"first"], {})
