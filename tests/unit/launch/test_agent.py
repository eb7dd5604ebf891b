"""The agent, with a link that is only pretended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from dure.launch import JobSpec
from dure.launch.agent.agent import Agent
from dure.launch.agent.link import Link
from dure.launch.round import Workplace


@dataclass
class Severed:
    """A link that has not reached anybody for long."""

    fence_at: float = 1.0


@dataclass
class Place:
    spec: JobSpec


@pytest.mark.parametrize(("elastic", "wake_at"), [(False, 1.0), (True, None)])
def test_ranks_that_know_by_themselves_who_is_left_outlive_a_severed_link(
    elastic: bool, wake_at: float | None
) -> None:
    spec = JobSpec(program="prog.py", nnodes=(1, 2), endpoint="127.0.0.1:1", elastic=elastic)
    agent = Agent(cast(Workplace, Place(spec)), cast(Link, Severed()))
    assert agent.wake_at == wake_at
