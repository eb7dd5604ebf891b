"""The agent, with a link that is only pretended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import pytest

from dure.launch import JobSpec
from dure.launch.agent.agent import Agent
from dure.launch.agent.events import Event, Expired, Settings, Timer
from dure.launch.agent.link import Link
from dure.launch.agent.machine import Machine
from dure.launch.agent.membership import Member
from dure.launch.round import Workplace


@dataclass
class Listening:
    """A link on which there is always news."""

    fd: int
    expires_at: float | None = None
    coordinates: bool = False
    agent: str = "me"
    told: list[Event] = field(default_factory=list[Event])

    def tell(self, event: Event) -> None:
        self.told.append(event)

    def machine(self) -> Machine:
        return Machine(Settings(min_hosts=2, max_hosts=2))


@dataclass
class Said:
    """A terminal that keeps what it is told."""

    lines: list[str] = field(default_factory=list[str])

    def say(self, text: str) -> None:
        self.lines.append(text)


@dataclass
class Place:
    spec: JobSpec
    signals: int = -1
    terminal: Said = field(default_factory=Said)


@pytest.fixture
def news() -> Iterator[int]:
    """Yield a pipe that can be read, once."""
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    os.write(theirs, b"!")
    yield ours
    os.close(ours)
    os.close(theirs)


def test_a_time_that_ran_out_in_vain_is_told_of_again(news: int) -> None:
    link = Listening(news)
    spec = JobSpec(program="prog.py", nnodes=(2, 2), endpoint="127.0.0.1:1")
    agent = Agent(cast(Workplace, Place(spec, news)), cast(Link, link))
    for due in (0.0, 0.0):
        agent._joined = cast(Member, link)
        agent._timers["join 0"] = due
        agent._wait(Timer("join 0", 600.0))
    assert link.told == [Expired("join 0"), Expired("join 0")]


def test_who_waits_for_other_hosts_says_so_once(news: int) -> None:
    place = Place(JobSpec(program="prog.py", nnodes=(2, 2), endpoint="127.0.0.1:1"), news)
    agent = Agent(cast(Workplace, place), cast(Link, None))
    agent._joined = cast(Member, Listening(news))
    agent._timers["join 0"] = time.monotonic() + 0.05
    for _ in range(2):
        agent._wait(Timer("join 0", 600.0))
    assert len(place.terminal.lines) == 1
    assert "127.0.0.1:1" in place.terminal.lines[0]
