"""Who is shut, and what the log says of it: without a server, with a clock of our own."""

import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest
import zmq

from dure.store import tracker
from dure.store.tracker import ConnectionTracker, close_inherited


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


@pytest.fixture
def hall(caplog: pytest.LogCaptureFixture) -> Iterator[Hall]:
    caplog.set_level(logging.WARNING, "dure.store")
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        it = Hall(listener)
        yield it
        for each in (*it.accepted, *it.peers):
            each.close()


def test_a_number_that_has_come_to_mean_something_else_is_left_alone(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "MOST", 0)
    fd = hall.enter()
    ours, other = socket.socketpair()
    with ours, other, hall.accepted[0].dup() as kept:
        os.dup2(ours.fileno(), fd)  # ZeroMQ has closed it, and the program opened another
        hall.tracker.tidy(0.0)
        os.dup2(kept.fileno(), fd)
        ours.sendall(b"still open")
        assert other.recv(100) == b"still open"


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


def test_refusals_are_counted_and_reported_rarely(
    hall: Hall, caplog: pytest.LogCaptureFixture
) -> None:
    def reported(now: float) -> list[str]:
        caplog.clear()
        hall.tracker.tidy(now)
        return [record.getMessage() for record in caplog.records]

    assert (reported(0.0), hall.tracker.due()) == ([], None)
    hall.tracker.refused("10.0.0.77:51234", "it has another job key")
    assert reported(0.0) == [
        "the store at tcp://here refused 10.0.0.77:51234: it has another job key"
    ]
    for port in range(3):
        hall.tracker.refused(f"10.0.0.99:{port}", "it left")
    assert hall.tracker.due() == tracker.QUIET_S
    assert reported(tracker.QUIET_S - 0.001) == []
    assert reported(tracker.QUIET_S) == [
        "the store at tcp://here refused 10.0.0.99:2 and 2 more: it left"
    ]
    assert hall.tracker.due() is None


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
