"""The agent while it waits for other hosts, with a membership that is only pretended."""

import signal
from types import SimpleNamespace
from typing import Any

from dure.launch import JobSpec
from dure.launch.agent.agent import Agent
from dure.launch.agent.events import JobOutcome
from dure.launch.signals import Interrupted


def test_a_signal_while_the_others_are_looked_for_is_the_exit_code() -> None:
    def join(host: str, port: int) -> None:
        raise Interrupted(signal.SIGTERM)

    place: Any = SimpleNamespace(spec=JobSpec(program="prog.py"), host="a")
    agent = Agent(place, SimpleNamespace(join=join))  # type: ignore[arg-type]
    assert agent.work() == JobOutcome(code=143)
    assert agent.interrupted_by == signal.SIGTERM
