"""What happens to the jobs of a drill, drawn from a seed before anything is started, and how such
jobs must end.

Every kill comes when the job is whole again, and two at nearly the same time are one round's or
two, which changes no end while restarts are left. What must make no difference to the end:

- A rank that is stopped and goes on is waited for.
- So is an agent, for a moment. One that is stopped past its deadline has no ranks any more, and
  comes back under another name: a restart of a job that has enough of them.
- Without its reaper a job goes on, and without its zygote; ranks that are replaced start afresh.

Stopped past its lease, the coordinator ends the ranks of all hosts: an elastic job begins anew.
Who coordinates ends the job for all: told to end, with that code; killed, with 1 for the others.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass

SAMPLES = 24
"""Samples of a step, which its ranks share."""

KILLED = 128 + signal.SIGKILL
TOLD = 128 + signal.SIGTERM

GONE, ASKED = -1, -2
"""In place of a local rank: the agent itself died, or was asked to end."""

AFTER_ANOTHER = (
    "worker during a restart",
    "newcomer while it joins",
    "newcomer while it gets the state",
    "survivor while it sends the state",
    "survivor while all regroup",
)
"""A worker is killed, and somebody else at what comes of that."""

RANKS = ("worker", "rank 0", "two at once", "three in 50 ms")
ROUNDS = (*RANKS, "worker during a restart", "rank 0 during a commit")
AGENTS = (
    "agent",
    "coordinator agent",
    "agent and a worker of another",
    "agent asked to end",
)
ELASTIC = (*RANKS, *AFTER_ANOTHER[1:], "worker during a commit")
"""Those whose deaths the job must deal with."""

HARMLESS = ("worker stopped", "agent stopped", "reaper", "zygote")
"""What must change nothing: who is stopped goes on after a while, and helpers may die."""

_HARMLESS_WEIGHTS = (3, 3, 3, 1)

LEASE_S = 5.0
"""The lease of the jobs' hosts."""

_LONG_S = (7.5, 10.0)
"""For so long an agent is stopped whom the others are to give up: longer than lease and margin."""

_TWO = (*AFTER_ANOTHER, "two at once", "agent and a worker of another")


@dataclass(frozen=True, slots=True)
class Kill:
    """One act of violence: whom, and how long after the job has made progress.

    `pick`, from 0 to 1, tells which of those in question; `stop_s`, how long a stop lasts.
    """

    victim: str
    delay_s: float
    pick: float
    stop_s: float = 0.0

    @property
    def deaths(self) -> int:
        """How many processes are killed."""
        return 3 if self.victim == "three in 50 ms" else 2 if self.victim in _TWO else 1

    @property
    def harmless(self) -> bool:
        """Whether nobody is killed whom the job would miss."""
        return self.victim in HARMLESS


@dataclass
class Death:
    """A kill that was carried out.

    Attributes:
        kill: As planned.
        at: When.
        who: The local ranks who died; or `GONE` or `ASKED` of an agent itself.
        coordinator: Whether it was the agent on whom all others depend.
        everyone: Whether the ranks of all hosts have ended, with what they had in memory.
        recovery_s: From then to the next commit.
    """

    kill: Kill
    at: float
    who: set[int]
    coordinator: bool = False
    everyone: bool = False
    recovery_s: float = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One job.

    Attributes:
        seed: What it was drawn from.
        kind: rounds or elastic.
        agents: How many hosts are played.
        nproc: Ranks of each.
        min_agents: Fewer hosts make no round.
        max_restarts: What the job is given.
        kills: One after the other, each after the job has recovered from the one before.
    """

    seed: int = 0
    kind: str
    agents: int
    nproc: int
    min_agents: int = 1
    max_restarts: int
    kills: tuple[Kill, ...]

    def __str__(self) -> str:
        victims = ", ".join(kill.victim for kill in self.kills)
        what = f"{self.kind}, {self.agents} agents of {self.nproc}, {self.max_restarts} restarts"
        return f"{what}: {victims}"

    def exit_code(self, deaths: list[Death]) -> int | None:
        """Return the code with which a history has ended the job; None: it goes on."""
        restarts = self.max_restarts
        for death in deaths:
            if death.coordinator:
                return TOLD if ASKED in death.who else 1
            if not death.who or ASKED in death.who:
                continue
            if self.kind == "elastic" and death.who == {GONE}:
                continue
            restarts -= 2 if death.kill.victim in AFTER_ANOTHER else 1
            if restarts < 0:
                return 1 if death.who == {GONE} else KILLED
        return None


def draw_plan(seed: int) -> Plan:
    """Draw a job."""
    chance = random.Random(seed)
    return (_rounds if chance.random() < 0.5 else _elastic)(seed, chance)


def _kill(chance: random.Random, victim: str) -> Kill:
    stop_s = chance.uniform(0.2, 2.5)
    if victim == "agent stopped" and chance.random() < 0.5:
        stop_s = chance.uniform(*_LONG_S)
    return Kill(victim, chance.uniform(0, 0.15), chance.random(), stop_s)


def _mixed(chance: random.Random, victims: tuple[str, ...], least: int, most: int) -> list[Kill]:
    """Draw some kills, and harmless acts between them."""
    kills: list[Kill] = []
    for _ in range(chance.randint(least, most)):
        if chance.random() < 0.25:
            kills.append(_kill(chance, chance.choices(HARMLESS, _HARMLESS_WEIGHTS)[0]))
        kills.append(_kill(chance, chance.choice(victims)))
    return kills


def _rounds(seed: int, chance: random.Random) -> Plan:
    agents = chance.choice((1, 2, 2, 3))
    kills = _mixed(chance, (*ROUNDS, *AGENTS) if agents > 1 else ROUNDS, 3, 6)
    restarts = 100
    if chance.random() < 0.2:  # then each must cost one, for certain
        certain = [k for k in kills if k.victim not in ("three in 50 ms", "agent stopped")]
        kills = [k for k in certain if "another" not in k.victim]
        restarts = chance.randrange(len(kills) + 1)
    return Plan(
        seed=seed,
        kind="rounds",
        agents=agents,
        nproc=chance.choice((1, 2)) if agents > 1 else 3,
        min_agents=max(1, agents - 1),
        max_restarts=restarts,
        kills=tuple(kills),
    )


def _elastic(seed: int, chance: random.Random) -> Plan:
    agents = chance.choice((1, 1, 2))
    kills = _mixed(chance, ELASTIC, 4, 7)
    if chance.random() < 0.6:
        last = ("agent", "coordinator agent", "agent asked to end")
        kills.append(_kill(chance, chance.choice(last)))
    return Plan(
        seed=seed,
        kind="elastic",
        agents=agents,
        nproc=4 // agents,
        max_restarts=100,
        kills=tuple(kills),
    )
