"""The leaders' watch and its channels: how they end, whatever they are in the middle of."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import pytest

from dure.comm.backends.abort import AbortRecord
from dure.comm.backends.hybrid.control import ControlMessage, HostWatch
from dure.comm.backends.hybrid.subcomms import group_by_host
from dure.errors import PeerLost, RendezvousTimeout
from dure.store import HashStore
from tests.comm.options import options
from tests.waiting import PATIENCE_S, until


class _State(SimpleNamespace):
    """What the watch asks of the group: whether it is broken. It never is."""

    def __init__(self) -> None:
        super().__init__(listeners=[], look=lambda: None)
        self.lose = self.settle = lambda *args, **said: None


def _connect(
    rank: int, store: HashStore, timeout_s: float = PATIENCE_S
) -> tuple[HostWatch, _State]:
    state, hosts = _State(), group_by_host([("a", "a"), ("b", "b")], rank)
    comms = SimpleNamespace(state=state, hosts=hosts, absent=tuple)
    headers = SimpleNamespace(begun=0, opened=0)
    return HostWatch(comms, headers, options(rank, 2, store, timeout_s)), state  # pyright: ignore


@pytest.fixture
def leaders() -> Iterator[list[tuple[HostWatch, _State]]]:
    """Two leaders, each of a host of its own, whose watches are connected and not started."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        yield list(pool.map(lambda rank: _connect(rank, store), (0, 1)))


def test_a_host_that_cannot_be_reached_is_named_with_the_address_and_port_that_failed():
    store, said = HashStore(), list[str]()
    for rank in (0, 1):  # host a waits alone, and when it has closed its port, b tries that
        with pytest.raises(RendezvousTimeout) as caught:
            _connect(rank, store, timeout_s=0.1)
        said.append(caught.value.seen)
    endpoint, _ = msgspec.msgpack.decode(store.get("control/0/1"))
    place = endpoint.removeprefix("tcp://")
    assert said == [
        f"no connection from host b (rank 1) to this host, at {place}",
        f"no connection from this host to host a (rank 0), at {place}",
    ]


def _started(watch: HostWatch) -> threading.Thread:
    before = set(threading.enumerate())
    watch.start()
    (thread,) = set(threading.enumerate()) - before
    return thread


def test_a_host_that_another_counts_as_lost_has_lost_that_one(leaders):
    """It would hear only that it was lost itself, which names nobody."""
    (watch, _), (other, state) = leaders
    lost: list[AbortRecord] = []
    patience: list[float] = []

    def lose(peer, what, after, patience_s, **said):
        patience.append(patience_s)
        lost.append(AbortRecord(kind="PeerLost", what=what, peer=peer, after=after, **said))

    state.lose = lose
    channel = watch.channel_to(1)
    seen = "its connection was closed"
    told = AbortRecord(kind="PeerLost", what="lost", peer=1, seen=seen, reporter=0, after=7)
    channel.send(ControlMessage(record=told))
    thread = _started(other)
    until(lambda: lost)
    other.stop(0)
    thread.join(PATIENCE_S)
    (record,) = lost
    assert patience[0] < 60  # what is under way may need the lost host
    assert (record.peer, record.after, record.what) == (0, 7, "host a (rank 0) is lost")
    assert isinstance(record.error(rank=1), PeerLost)
    watch.stop(0)
