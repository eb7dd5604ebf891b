"""The state that decides on rounds, in thousands of random histories.

The histories are made of what can happen to real agents: they join, leave, are lost, their workers
fail or succeed, and they do what their action says, in any order and late. After each event the
rules that must always hold are checked.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.launch.agent.elastic import ElasticMachine
from dure.launch.agent.events import (
    Ended,
    Event,
    Expired,
    Failed,
    Finished,
    Joined,
    Leave,
    Left,
    Lost,
    Missing,
    Prepare,
    Ready,
    Rejoin,
    Settings,
    Stop,
    Wait,
    Work,
)
from dure.launch.agent.machine import Machine, Phase
from tests.launch.agent.job_states import result


def copy(machine: Machine) -> Machine:
    """Return what another agent reads of what one has written."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(machine), type=type(machine))


class World:
    """Agents that obey one state, and a fate that draws what happens to them next."""

    def __init__(self, machine: Machine, draw: random.Random) -> None:
        self.machine, self.draw = machine, draw
        self.elastic = isinstance(machine, ElasticMachine)
        self.log: list[Event] = []
        self.born = 0
        self.here: list[str] = []
        self.running: dict[str, int] = {}  # agent to the round whose workers it has

    def tell(self, event: Event) -> None:
        before = copy(self.machine)
        self.log.append(event)
        self.machine.apply(event)
        again = copy(self.machine)
        again.apply(event)  # of one who does not know that it has arrived
        assert again == self.machine
        self.check(before)

    def check(self, before: Machine) -> None:
        machine, wanted, plan = self.machine, self.machine.settings, self.machine.plan
        assert before.restarts <= machine.restarts <= wanted.max_restarts
        assert before.excluded == machine.excluded or machine.restarts > before.restarts
        assert (machine.phase is Phase.OVER) == (machine.outcome is not None)
        if before.phase is Phase.OVER:
            assert machine == before
        if plan is None:
            return
        assert len(set(plan.members)) == len(plan.members)
        ranks = [plan.owner(rank) for rank in range(sum(plan.nprocs))]
        assert [ranks.count(each) for each in plan.joined] == list(plan.nprocs)
        if plan == before.plan or self.elastic:
            return
        assert not self.running, "two rounds run at once"
        assert plan.number == (0 if before.plan is None else before.plan.number + 1)
        assert wanted.min_hosts <= len(plan.members) <= wanted.max_hosts
        assert not machine.excluded & {each.machine for each in plan.joined}

    def obey(self, agent: str) -> None:
        """Let an agent do its action."""
        action = self.machine.action(agent)
        match action:
            case Work():
                others = {number for a, number in self.running.items() if a != agent}
                assert others <= {action.plan.number}, "two rounds run at once"
                assert self.machine._agents[agent].machine not in self.machine.excluded
                self.running[agent] = action.plan.number
            case Prepare():
                self.tell(Ready(agent, action.plan.number, "10.0.0.1", 29500))
            case Stop():
                self.running.pop(agent, None)
                self.tell(Ended(agent, action.plan.number))
            case Leave() | Rejoin():
                self.running.pop(agent, None)
                self.here.remove(agent)
                if isinstance(action, Leave):
                    self.tell(Left(agent, action.outcome.code))
            case Wait():
                if action.timer is not None and self.draw.random() < 0.3:
                    self.tell(Expired(action.timer.name))

    def join(self) -> None:
        agent, self.born = f"{self.born}", self.born + 1
        node_rank = self.draw.choice([None, None, self.draw.randrange(4)])
        self.here.append(agent)
        host = f"h{self.draw.randrange(5)}"
        self.tell(Joined(agent, host, self.draw.randrange(1, 4), node_rank))

    def work(self, agent: str) -> None:
        """Let something become of an agent's workers."""
        plan, number = self.machine.plan, self.running.get(agent)
        if plan is None or number is None or agent not in plan.members:
            return
        node = plan.node_of(agent)
        local = self.draw.randrange(plan.nprocs[node])
        if self.draw.random() < 0.5:
            peer = self.draw.choice([None, self.draw.randrange(sum(plan.nprocs))])
            action = self.machine.action(agent)
            times = dict(action.replaced).get(local, 0) if isinstance(action, Work) else 0
            worker = result(sum(plan.nprocs[:node]) + local, f"host-{agent}", peer=peer)
            self.tell(Failed(agent, number, local, worker, times))
        elif self.elastic:
            self.tell(Finished(agent, number, local))
        else:
            del self.running[agent]
            self.tell(Ended(agent, number, well=True))

    def strike(self) -> None:
        agent = self.draw.choice(self.here)
        leaves = self.draw.random() < 0.5
        if leaves:
            self.tell(Left(agent, 143))
        if not leaves or agent not in self.machine.agents:
            self.here.remove(agent)
            self.running.pop(agent, None)
        if not leaves:
            self.tell(Lost(agent))

    def step(self) -> None:
        kind = self.draw.random()
        if not self.here or kind < 0.15:
            self.join()
        elif kind < 0.25:
            self.strike()
        elif kind < 0.45:
            self.work(self.draw.choice(self.here))
        elif kind < 0.5 and self.log:
            late = self.draw.choice(self.log)  # and twice
            if not isinstance(late, Joined) or late.agent in self.machine.agents:
                self.tell(late)
        elif kind < 0.52 and self.machine.plan is not None:
            self.tell(Missing(self.draw.choice(self.here), self.machine.plan.number))
        else:
            self.obey(self.draw.choice(self.here))

    def finish(self) -> None:
        """Let nothing more happen but what must: everybody does his action, all clocks run out."""
        for _ in range(200):
            if self.machine.phase is Phase.OVER or not self.machine.agents:
                return
            for agent in list(self.here):
                action = self.machine.action(agent)
                self.obey(agent)
                if isinstance(action, Wait) and action.timer is not None:
                    self.tell(Expired(action.timer.name))
                number, plan = self.running.get(agent), self.machine.plan
                if number is not None and plan is not None and self.elastic:
                    for local in range(plan.nprocs[plan.node_of(agent)]):
                        self.tell(Finished(agent, number, local))
                elif number is not None:
                    del self.running[agent]
                    self.tell(Ended(agent, number, well=True))
        raise AssertionError("the history has no end")


@pytest.mark.parametrize("kind", [Machine, ElasticMachine])
@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 60))
def test_random_histories_keep_the_rules_and_end(
    kind: type[Machine], seed: int, steps: int
) -> None:
    draw = random.Random(seed)
    least = draw.randrange(1, 4)
    wanted = Settings(
        min_hosts=least,
        max_hosts=least + draw.choice([0, 0, 1, 3]),
        max_restarts=draw.randrange(5),
        exclude_after=draw.randrange(1, 4),
        min_ranks=draw.randrange(1, 4),
    )
    world = World(kind(wanted), draw)
    for _ in range(steps):
        world.step()
    world.finish()
