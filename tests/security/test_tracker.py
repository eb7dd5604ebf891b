"""Who is shut, and what the log says of it: without a server, with a clock of our own."""

import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest
import zmq

from dure.store import tracker
from dure.store.tracker import QUIET_S, ConnectionTracker, close_inherited


class Hall:
    """Real connections, whose events are told to a tracker in place of ZeroMQ."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.port = listener.getsockname()[1]
        self.tracker = ConnectionTracker("tcp://here", self.port)
        self.accepted: list[socket.socket] = []
        self.peers: list[socket.socket] = []

    def enter(self, source: str = "127.0.0.1") -> int:
        peer = socket.create_connection(("127.0.0.1", self.port), source_address=(source, 0))
        accepted, _ = self._listener.accept()
        self.peers.append(peer)
        self.accepted.append(accepted)
        self.tracker.event(zmq.Event.ACCEPTED, accepted.fileno())
        return accepted.fileno()

    def leave(self, fd: int) -> bytes:
        return self.tracker.event(zmq.Event.DISCONNECTED, fd)

    def is_out(self, index: int) -> bool:
        self.peers[index].setblocking(False)
        try:
            return self.peers[index].recv(1) == b""
        except BlockingIOError:
            return False


@pytest.fixture
def hall(caplog: pytest.LogCaptureFixture) -> Iterator[Hall]:
    caplog.set_level(logging.WARNING, "dure.store")
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        it = Hall(listener)
        yield it
        for each in (*it.accepted, *it.peers):
            each.close()


def test_of_too_many_the_oldest_of_the_greatest_crowd_is_shut(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "MOST", 8)
    hall.enter("127.0.0.9")
    hall.tracker.admit(b"member", hall.enter())
    for _ in range(9):
        hall.enter()
    hall.tracker.tidy(0.0)
    assert [hall.is_out(i) for i in range(6)] == [False, False, True, True, False, False]


def test_a_number_that_has_come_to_mean_something_else_is_left_alone(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "MOST", 0)
    fd = hall.enter()
    ours, other = socket.socketpair()
    with ours, other:
        kept = os.dup(fd)
        os.dup2(ours.fileno(), fd)  # ZeroMQ has closed it, and the program opened another
        hall.tracker.tidy(0.0)
        ours.sendall(b"still open")
        assert other.recv(100) == b"still open"
        os.dup2(kept, fd)
        os.close(kept)


def test_a_member_that_leaves_is_named_and_not_refused(
    hall: Hall, caplog: pytest.LogCaptureFixture
) -> None:
    fd = hall.enter()
    hall.tracker.admit(b"member", fd)
    assert hall.tracker.clients == {b"member"}
    assert hall.leave(fd) == b"member"
    assert not hall.tracker.clients
    assert not hall.tracker.members
    hall.tracker.tidy(float("inf"))
    assert not caplog.records


def test_one_line_at_once_and_then_one_with_a_count(
    hall: Hall, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(100):
        fd = hall.enter()
        hall.tracker.event(zmq.Event.HANDSHAKE_FAILED_AUTH, 0)
        hall.leave(fd)
        hall.tracker.tidy(1.0)
    assert len(caplog.records) == 1
    assert "refused 127.0.0.1:" in caplog.records[0].getMessage()
    assert hall.tracker.due() == 1.0 + QUIET_S
    hall.tracker.tidy(1.0 + QUIET_S)
    assert "and 98 more: it has another job key" in caplog.records[1].getMessage()
    assert hall.tracker.due() is None
    hall.tracker.event(zmq.Event.ACCEPTED, 99_999)  # a descriptor that is closed already
    hall.leave(99_999)
    hall.tracker.tidy(float("inf"))
    assert len(caplog.records) == 3


def test_the_limit_of_descriptors_is_raised_under_pressure_only(hall: Hall) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    small = min(512, soft)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (small, hard))
        for fd in range(10_000, 10_000 + small // 4 - 1):
            hall.tracker.event(zmq.Event.ACCEPTED, fd)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == small
        hall.tracker.event(zmq.Event.ACCEPTED, 9_999)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > small
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_forked_child_closes_the_servers_sockets_only(hall: Hall) -> None:
    fd = os.dup(hall.enter())
    ours, other = socket.socketpair()
    with ours, other, open(os.devnull, "rb") as file:
        close_inherited([fd, ours.fileno(), file.fileno(), 99_999], hall.port)
        with pytest.raises(OSError):
            os.fstat(fd)
        os.fstat(ours.fileno())
        os.fstat(file.fileno())
