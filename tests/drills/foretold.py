"""How a job of a drill must end, as the launcher's pure machines have it.

What has happened is told to the machine as events, as agents would tell it: everyone does his duty
at once, and every kill comes when the job is whole again. Only the end is compared, since two
deaths at nearly the same time are one round's or two, which changes no end while restarts are left.

What is no event to the machine must make no difference to the job:

- A rank that is stopped and goes on is waited for.
- So is an agent, for a moment. One that is stopped for longer than others wait for a sign of it is
  lost to them, and comes back under another name: a restart of a job that has enough of them.
- Without its guardian a job goes on; only when the launcher dies as well, its files are left, and
  what ranks print.
- Without its zygote a job goes on; ranks that are replaced start afresh.
"""

from __future__ import annotations

import signal

from drills.jobs import ASKED, Death, Job
from drills.plans import Plan
from dure.launch.agent.duties import Prepare, Stop, Work
from dure.launch.agent.elastic import ElasticMachine
from dure.launch.agent.events import (
    Ended,
    Expired,
    Failed,
    Finished,
    Joined,
    Left,
    Lost,
    Ready,
    Succeeded,
)
from dure.launch.agent.machine import Machine, Phase
from dure.launch.agent.settings import Settings
from dure.launch.spec import Exit, RankResult


def exit_code(job: Job) -> int:
    """Return the code with which the agents of a job that live to its end must end."""
    return Foretelling(job.plan).end(job.deaths)


def goes_on(plan: Plan, deaths: list[Death]) -> bool:
    """Tell whether a job goes on after a history."""
    foretelling = Foretelling(plan)
    foretelling.tell(deaths)
    return foretelling.machine.phase is not Phase.OVER


class Foretelling:
    """A machine, and agents that obey it."""

    def __init__(self, plan: Plan) -> None:
        settings = Settings(
            min_hosts=plan.min_agents,
            max_hosts=plan.agents,
            max_restarts=plan.max_restarts,
        )
        self._plan = plan
        self._elastic = plan.kind == "elastic"
        self.machine = (ElasticMachine if self._elastic else Machine)(settings)
        self._here: list[str] = []

    def end(self, deaths: list[Death]) -> int:
        """Return the exit code after a history, and a good end if the job lives to it."""
        self.tell(deaths)
        if self.machine.phase is not Phase.OVER:
            self._finish()
        assert self.machine.outcome is not None, self.machine.phase
        return self.machine.outcome.code

    def tell(self, deaths: list[Death]) -> None:
        """Tell a history."""
        for _ in range(self._plan.agents):
            self._join()
        self._obey()
        for death in deaths:
            if self.machine.phase is Phase.OVER:
                break
            for _ in range(death.times):
                self._happen(death)

    def _join(self) -> None:
        name = f"agent-{len(self._here)}"
        self._here.append(name)
        self.machine.apply(Joined(name, name, self._plan.nproc))

    def _happen(self, death: Death) -> None:
        plan = self.machine.plan
        assert plan is not None
        alive = [agent for agent in plan.members if agent in self.machine.agents]
        for agent, local in death.who:
            if local < 0:
                name = alive[agent % len(alive)]
                asked = Left(name, 128 + signal.SIGTERM)
                self.machine.apply(asked if local == ASKED else Lost(name))
                if self._plan.returns:
                    self._join()
                continue
            rank = agent * self._plan.nproc + local
            worker = RankResult(rank=rank, host="", pid=0, exit=Exit(signal=9))
            self.machine.apply(Failed(alive[agent % len(alive)], plan.number, local, worker))
        self._obey()

    def _obey(self) -> None:
        """Let all agents do their duties, until nobody has any but to work."""
        for _ in range(1000):
            before = self.machine.phase, self.machine.plan
            for agent in self.machine.agents:
                match self.machine.duty(agent):
                    case Prepare(plan=plan):
                        self.machine.apply(Ready(agent, plan.number, "127.0.0.1", 1))
                    case Stop(plan=plan):
                        self.machine.apply(Ended(agent, plan.number))
                    case Work():
                        pass
                    case _ if self.machine.phase is Phase.GATHERING:
                        for timer in ("last call", "join"):
                            for number in range(100):
                                self.machine.apply(Expired(f"{timer} {number}"))
                    case _:
                        pass
            if (self.machine.phase, self.machine.plan) == before:
                return

    def _finish(self) -> None:
        """Let all workers end well."""
        plan = self.machine.plan
        assert plan is not None
        for agent, nproc in zip(plan.members, plan.nprocs, strict=True):
            if agent not in self.machine.agents:
                continue
            if not self._elastic:
                self.machine.apply(Succeeded(agent, plan.number))
                continue
            for local in range(nproc):
                self.machine.apply(Finished(agent, plan.number, local))
        self._obey()
