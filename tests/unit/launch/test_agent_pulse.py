"""Agents that share a log over real stores: it stays short, and outlives its store.

Each agent here is a `Pulse` with a server of its own on loopback; their "hosts" are threads.
"""

from __future__ import annotations

import functools
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from dure.launch.agent.chronicle import Chronicle
from dure.launch.agent.duties import Rejoin
from dure.launch.agent.events import Event, Joined, Refused
from dure.launch.agent.journal import entry_key
from dure.launch.agent.machine import Machine
from dure.launch.agent.pulse import Pulse
from dure.launch.agent.settings import Settings
from dure.launch.agent.watch import Heartbeat, Watch
from dure.store.address import resolve
from dure.store.key import JobKey, mint
from dure.store.ladder import Ladder
from dure.store.listener import listen
from dure.store.server import StoreServer

KEEP = 8
FEW = 3 * KEEP
"""So many entries at least are kept in a job of three agents."""

MANY = 3 * FEW
PATIENT = Heartbeat(beat_s=0.1, lost_s=30.0, fence_s=29.0, look_s=0.05, knock_s=10.0)


def make() -> Machine:
    return Machine(Settings(min_hosts=9, max_hosts=9))


class Agent:
    """One agent: a server, a pulse, and a machine that is fed by it."""

    def __init__(self, name: str, key: JobKey, first: str | None, heart: Heartbeat) -> None:
        self.name, self.key, self.servers = name, key, list[StoreServer]()
        own = self.own = self.serve()
        self.ladder = Ladder([first or own], key, own=own, patience_s=30.0)
        if first is None:
            self.ladder.lead()
        else:
            self.ladder.join(30)
            self.ladder.stand_by()
        self.first = first or own
        self.machine = make()
        self.pulse = Pulse(self.ladder, Watch(key, heart), (), self.serve, make)
        self.pulse.me = name
        self.told = 0

    def serve(self) -> str:
        server = StoreServer(listen(resolve("127.0.0.1", 0)), self.key)
        self.servers.append(server)
        return f"127.0.0.1:{server.port}"

    def join(self) -> None:
        self.pulse.tell(Joined(self.name, f"host-{self.name}", 1, None, self.own))

    def say(self, times: int) -> None:
        """Tell of as many hosts that were refused."""
        for _ in range(times):
            self.told += 1
            self.pulse.tell(Refused(self.name, str(self.told)))

    def fed(self) -> Machine:
        afresh, news = self.pulse.take()
        self.machine = self.machine if afresh is None else afresh
        for event in news:
            self.machine.apply(event)
        return self.machine

    def until(self, done: Callable[[Machine], bool]) -> Machine:
        """Wait until the machine is as it should be."""
        deadline = time.monotonic() + 60
        while not done(self.fed()):
            assert not self.pulse.cut, self.pulse.cut
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{self.name} waits for ever: {self.machine}"
            select.select([self.pulse.fd], [], [], 0.05)
        return self.machine

    def hears(self, *others: Agent) -> None:
        """Wait until all that these agents have told has come, and our own is in the log."""
        last = {f"{a.name} came with other terms and was refused: {a.told}" for a in others}
        self.until(lambda machine: last <= set(machine.notes) and self.pulse.settled)

    def kept(self) -> int:
        """Return how many entries the store has."""
        return sum("/log/" in name for name in self.ladder.current.list_keys())

    def end(self) -> None:
        self.pulse.close()
        for server in self.servers:
            server.stop()


Come = Callable[..., Agent]


@pytest.fixture
def come(monkeypatch: pytest.MonkeyPatch) -> Iterator[Come]:
    """Yield a function that starts an agent, at the first one's store."""
    monkeypatch.setattr(
        "dure.launch.agent.pulse.Chronicle", functools.partial(Chronicle, keep=KEEP)
    )
    key, agents = mint(), list[Agent]()

    def start(name: str, *, alone: bool = False, heart: Heartbeat = PATIENT) -> Agent:
        agent = Agent(name, key, agents[0].first if agents and not alone else None, heart)
        agents.append(agent)
        return agent

    yield start
    for agent in agents:
        agent.end()


def test_the_log_stays_short_and_who_comes_late_knows_all(come: Come) -> None:
    a, b = come("a"), come("b")
    for agent in (a, b):
        agent.join()
        agent.say(MANY)
    for agent in (a, b):
        agent.hears(a, b)
    late = come("late")
    late.hears(a, b)
    assert a.machine == b.machine == late.machine
    assert len(a.machine.agents) == 2
    a.until(lambda _: a.kept() <= 2 * FEW)
    assert len(a.pulse._mine) <= 2 * FEW


def test_a_store_that_dies_takes_nothing_along_that_was_said(come: Come) -> None:
    a, b, c = come("a"), come("b"), come("c")
    for agent in (b, c):
        agent.join()
        agent.say(FEW)
        agent.hears(agent)
    a.servers[0].stop()
    for agent in (b, c):
        agent.say(FEW)
    for agent in (b, c):
        agent.hears(b, c)
    assert b.machine == c.machine
    assert set(b.machine.agents) == {"b", "c"}
    b.until(lambda _: b.kept() <= 2 * FEW)


def test_where_nobody_can_give_back_what_is_forgotten_an_agent_joins_anew(come: Come) -> None:
    a = come("a")
    a.join()
    a.say(3 * KEEP)
    a.hears(a)
    other = come("other", alone=True)
    a.ladder.current.set("dure/ladder/moved", other.first)
    a.until(lambda machine: isinstance(machine.duty("a"), Rejoin) and a.pulse.settled)
    a.say(1)
    a.hears(a)
    other.hears(a)


def test_events_travel_in_the_order_in_which_they_were_told(come: Come) -> None:
    a, b = come("a"), come("b")
    b.say(KEEP)
    heard: list[Event] = []
    while len(heard) < KEEP:
        select.select([a.pulse.fd], [], [], 60)
        heard += a.pulse.take()[1]
    assert heard == [Refused("b", str(n + 1)) for n in range(KEEP)]


def test_a_log_that_cannot_be_read_ends_the_job_with_the_reason(come: Come) -> None:
    a = come("a", heart=replace(PATIENT, lost_s=0.1))
    a.ladder.current.set(entry_key(0), b"of another version")
    while not a.pulse.cut:
        select.select([a.pulse.fd], [], [], 60)
        a.fed()
    assert "cannot be read" in a.pulse.cut
