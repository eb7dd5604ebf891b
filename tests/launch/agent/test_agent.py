"""The agent while it waits for other hosts, with a membership that is only pretended."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

from dure.launch import JobSpec
from dure.launch.agent.agent import Agent
from dure.launch.agent.events import Event, Expired, Timer, Wait
from dure.launch.agent.membership import boottime


def test_who_waits_says_so_once_and_tells_again_of_a_time_that_ran_out_in_vain() -> None:
    said: list[str] = []
    told: list[Event] = []
    news, ours = os.pipe2(os.O_NONBLOCK)
    member: Any = SimpleNamespace(
        fd=news, expires_at=boottime() + 500, agent="a", tell=told.append, missing=2
    )
    place: Any = SimpleNamespace(
        spec=JobSpec(program="prog.py", nnodes=(2, 2), endpoint="127.0.0.1:1"),
        signals=news,
        terminal=SimpleNamespace(say=said.append),
    )
    agent = Agent(place, SimpleNamespace(coordinates=False))  # type: ignore[arg-type]
    agent._member = member
    try:
        agent._timers["join 0"] = time.monotonic() + 500
        for _ in range(2):
            os.write(ours, b"!")  # which ends the wait
            agent._wait(Timer("join 0", 600.0))
        assert len(said) == 1
        assert "127.0.0.1:1" in said[0]
        for _ in range(2):
            agent._timers["join 0"] = 0.0
            agent._wait(Timer("join 0", 600.0))
        assert told == [Expired("join 0"), Expired("join 0")]
        for _ in range(2):
            os.write(ours, b"!")
            agent._do(Wait(spare="the job runs without this host"))
        assert said[1:] == ["the job runs without this host"]
    finally:
        os.close(news)
        os.close(ours)
