"""The agent while it waits for other hosts, with a membership that is only pretended."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

from dure.launch import JobSpec
from dure.launch.agent.agent import Agent
from dure.launch.agent.events import Event, Expired, Idle, JobOutcome
from dure.launch.agent.membership import boottime
from dure.launch.signals import Interrupted


def test_who_waits_says_so_once_and_reports_again_a_time_that_ran_out_without_effect() -> None:
    said: list[str] = []
    told: list[Event] = []
    news, ours = os.pipe2(os.O_NONBLOCK)
    member: Any = SimpleNamespace(
        fd=news, expires_at=boottime() + 500, agent="a", report=told.append
    )
    place: Any = SimpleNamespace(
        spec=JobSpec(program="prog.py", nnodes=(2, 2), endpoint="127.0.0.1:1"),
        signals=news,
        terminal=SimpleNamespace(say=said.append),
    )
    agent = Agent(place, SimpleNamespace(coordinates=False))  # type: ignore[arg-type]
    agent._member = member
    try:
        for quiet_s, after_s in ((500.0, 600.0), (0.0, 600.0), (0.0, 0.0), (0.0, 0.0)):
            os.write(ours, b"!")  # which ends the wait
            agent._do(Idle("join 0", after_s, "waits for hosts", quiet_s))
            assert said == ([] if quiet_s else ["waits for hosts"])
        assert told == [Expired("join 0"), Expired("join 0")]
    finally:
        os.close(news)
        os.close(ours)


def test_a_signal_while_the_others_are_looked_for_is_the_exit_code() -> None:
    def join(host: str, port: int) -> None:
        raise Interrupted(signal.SIGTERM)

    place: Any = SimpleNamespace(spec=JobSpec(program="prog.py"), host="a")
    agent = Agent(place, SimpleNamespace(join=join))  # type: ignore[arg-type]
    assert agent.work() == JobOutcome(code=143)
    assert agent.interrupted_by == signal.SIGTERM
