"""What the machine wants of an agent: its present duty, and the values that this names."""

from __future__ import annotations

from dataclasses import dataclass

from dure.launch.agent.events import Ready
from dure.launch.spec import RankResult

__all__ = ["Duty", "Leave", "Outcome", "Plan", "Prepare", "Rejoin", "Stop", "Timer", "Wait", "Work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One round: who takes part, in the order of their nodes.

    Attributes:
        number: 0 for the first round; every later start of the workers has the next number.
        members: The agents.
        hosts: Their hosts' names.
        nprocs: How many ranks each of them starts.
    """

    number: int
    members: tuple[str, ...]
    hosts: tuple[str, ...]
    nprocs: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return sum(self.nprocs)

    def node_of(self, agent: str) -> int:
        """Return the node's number of an agent."""
        return self.members.index(agent)

    def host_of(self, agent: str) -> str:
        """Return the host of a member, who may be gone; of others, their name."""
        return self.hosts[self.node_of(agent)] if agent in self.members else agent

    def owner(self, rank: int) -> str | None:
        """Return the agent that starts a rank."""
        for agent, nproc in zip(self.members, self.nprocs, strict=True):
            if rank < nproc:
                return agent
            rank -= nproc
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the job ended: what every agent exits with, and why.

    Attributes:
        code: The exit code.
        why: What the launcher says of it, if it was no worker's failure.
        failure: The worker that failed first, or whom that one blames.
        ranks: What became of all workers of the last round, as far as they were told.
        limit: Which limit of the user's the job has come to, if it failed by one.
    """

    code: int
    why: str = ""
    failure: RankResult | None = None
    ranks: tuple[RankResult, ...] = ()
    limit: str = ""


@dataclass(frozen=True, slots=True)
class Timer:
    """Say `Expired(name)` if nothing has changed after so many seconds."""

    name: str
    after_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing to do, but perhaps something to wait for."""

    timer: Timer | None = None


@dataclass(frozen=True, slots=True)
class Prepare:
    """Keep a port for rank 0 of this round, and say `Ready`."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Work:
    """Run the workers of this round; `replaced` counts, by local rank, the replacements due."""

    plan: Plan
    ready: Ready
    replaced: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """End the workers of this round, and say `Ended` when nothing of them is left."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Rejoin:
    """The others have given this agent up: end what runs, and join under another name."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End, with this outcome."""

    outcome: Outcome


Duty = Wait | Prepare | Work | Stop | Rejoin | Leave
