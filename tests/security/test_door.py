"""Who is shown out, and what the log says of it: without a server, with a clock of our own."""

import contextlib
import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest
import zmq

from dure.store import door as door_module
from dure.store.door import CROWD, MOST, PATIENCE_S, Door, Refusals, close_inherited


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as it:
        yield it


@pytest.fixture
def hall(listener: socket.socket) -> Iterator["Hall"]:
    it = Hall(listener)
    yield it
    it.close()


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "dure.store")
    return caplog


class Hall:
    """Real connections, whose events are told to a door in place of ZeroMQ."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.port = listener.getsockname()[1]
        self.door = Door("tcp://here", self.port)
        self.accepted: list[socket.socket] = []
        self.peers: list[socket.socket] = []

    def enter(self, now: float, source: str = "127.0.0.1") -> int:
        peer = socket.create_connection(("127.0.0.1", self.port), source_address=(source, 0))
        accepted, _ = self._listener.accept()
        self.peers.append(peer)
        self.accepted.append(accepted)
        self.door.event(zmq.Event.ACCEPTED, accepted.fileno(), now)
        return accepted.fileno()

    def leave(self, fd: int, now: float) -> bytes:
        return self.door.event(zmq.Event.DISCONNECTED, fd, now)

    def is_out(self, index: int) -> bool:
        self.peers[index].setblocking(False)
        try:
            return self.peers[index].recv(1) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        self.door.close()
        for each in (*self.accepted, *self.peers):
            each.close()


def test_a_crowd_is_borne_for_a_while_and_members_stay(hall: Hall) -> None:
    member = hall.enter(0.0)
    hall.door.admit(b"member", member)
    for _ in range(CROWD + 3):
        hall.enter(1.0)
    hall.door.tidy(1.0 + PATIENCE_S - 0.01)
    assert hall.door.strangers == CROWD + 3
    assert hall.door.due() == 1.0 + PATIENCE_S
    hall.door.tidy(1.0 + PATIENCE_S)
    assert hall.door.strangers == CROWD
    assert [hall.is_out(i) for i in range(6)] == [False, True, True, True, False, False]


def test_more_than_most_are_not_borne_and_the_greatest_crowd_loses(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MOST", 8)
    hall.enter(0.0, "127.0.0.9")
    for _ in range(9):
        hall.enter(0.0)
    hall.door.tidy(0.0)
    assert hall.door.strangers == 8
    assert [hall.is_out(i) for i in range(4)] == [False, True, True, False]
    assert MOST > CROWD


def test_a_number_that_has_come_to_mean_something_else_is_left_alone(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MOST", 0)
    fd = hall.enter(0.0)
    ours, other = socket.socketpair()
    with ours, other:
        kept = os.dup(fd)
        os.dup2(ours.fileno(), fd)  # ZeroMQ has closed it, and the program opened another
        hall.door.tidy(0.0)
        ours.sendall(b"still open")
        assert other.recv(100) == b"still open"
        os.dup2(kept, fd)
        os.close(kept)


def test_a_member_that_leaves_is_named_and_not_refused(
    hall: Hall, log: pytest.LogCaptureFixture
) -> None:
    fd = hall.enter(0.0)
    hall.door.admit(b"member", fd)
    assert hall.door.knows(b"member")
    assert hall.leave(fd, 1.0) == b"member"
    assert not hall.door.knows(b"member")
    assert hall.door.empty
    hall.door.tidy(2.0)
    assert not log.records


def test_who_left_before_he_could_be_asked_is_named_by_the_kernel(
    hall: Hall, log: pytest.LogCaptureFixture
) -> None:
    if hall.door.fd is None:
        pytest.skip("this system does not tell of the end of connections")
    fd = hall.enter(0.0, "127.0.0.7")
    name = f"127.0.0.7:{hall.peers[0].getsockname()[1]}"
    hall.leave(fd, 0.0)
    log.clear()
    door = Door("tcp://here", hall.port)
    with contextlib.closing(door):
        door.event(zmq.Event.ACCEPTED, 99_999, 1.0)  # a descriptor that is closed already
        door.event(zmq.Event.DISCONNECTED, 99_999, 1.0)
        assert not log.records
        hall.accepted[0].close()
        hall.peers[0].close()
        poller = zmq.Poller()
        poller.register(door.fd, zmq.POLLIN)
        assert poller.poll(5000)
        door.hear()
    assert name in log.records[0].getMessage()


def test_nameless_ones_are_told_of_all_the_same(
    listener: socket.socket, log: pytest.LogCaptureFixture
) -> None:
    door = Door("ipc://here", 0)
    door.event(zmq.Event.ACCEPTED, 99_999, 1.0)
    door.event(zmq.Event.DISCONNECTED, 99_999, 1.0)
    door.tidy(1.1)
    assert not log.records
    due = door.due()
    assert due is not None
    door.tidy(due)
    assert len(log.records) == 1
    door.close()


def test_one_line_for_an_address_and_a_reason_then_a_count(
    log: pytest.LogCaptureFixture,
) -> None:
    refusals = Refusals("the store")
    for i in range(1000):
        refusals.note("10.0.0.7", f"10.0.0.7:{i}", "why", i / 1000)
    assert len(log.records) == 1
    assert "10.0.0.7:0" in log.records[0].getMessage()
    refusals.flush(9.0)
    assert len(log.records) == 1
    assert refusals.due() == 10.0
    refusals.flush(10.0)
    assert len(log.records) == 2
    assert "10.0.0.7:999 (and 998 times more)" in log.records[1].getMessage()
    refusals.flush(20.0)
    assert len(log.records) == 2
    assert refusals.due() is None


def test_many_addresses_get_few_lines_and_little_memory(log: pytest.LogCaptureFixture) -> None:
    refusals = Refusals("the store")
    for i in range(100_000):
        refusals.note(f"2001:db8::{i:x}", "peer", "why", i / 10_000)  # within 10 s
    assert len(log.records) <= 8
    assert len(refusals._tallies) <= 256
    refusals.flush(21.0)
    assert "more, of other addresses" in log.records[-1].getMessage()
    total = sum(int(r.getMessage().split(" more,")[0].split()[-1]) for r in log.records[8:])
    assert total == 100_000 - 8


def test_the_last_words_are_few(log: pytest.LogCaptureFixture) -> None:
    refusals = Refusals("the store")
    for i in range(100):
        for _ in range(2):
            refusals.note(f"10.0.0.{i}", "peer", "why", 0.0)
    said = len(log.records)
    refusals.last_words()
    assert len(log.records) <= said + 9
    assert "more, of other addresses" in log.records[-1].getMessage()


def test_the_limit_of_descriptors_is_raised_under_pressure_only() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    small = min(512, soft)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (small, hard))
        door_module._have_descriptors_for(small // 8)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == small
        door_module._have_descriptors_for(small // 4)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > small
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_forked_child_closes_the_servers_sockets_only(hall: Hall) -> None:
    fd = os.dup(hall.enter(0.0))
    ours, other = socket.socketpair()
    with ours, other:
        close_inherited([fd, ours.fileno(), 99_999], hall.port)
        with pytest.raises(OSError):
            os.fstat(fd)
        os.fstat(ours.fileno())


def test_a_number_that_is_no_sockets_any_more_leaves_nothing_open(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MOST", 0)
    with open(os.devnull, "rb") as other:
        before = len(os.listdir("/proc/self/fd"))
        hall.door.event(zmq.Event.ACCEPTED, other.fileno(), 0.0)
        hall.door.tidy(0.0)
        assert hall.door.strangers == 0
        close_inherited([other.fileno()], hall.port)
        assert len(os.listdir("/proc/self/fd")) == before
