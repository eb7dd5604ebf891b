"""Plans of the jobs of a drill, drawn from a seed before a job starts, and their expected outcomes.

Every kill happens to a job that has recovered from the last one. Two kills at nearly the same time
cost one round or two, which does not change the outcome while restarts are left. These events must
not change the outcome either:

- A rank, or for a short time an agent, is stopped and continued: the others wait for it.
- An agent is stopped longer than its lease: its ranks are ended, and it returns under another name,
  which costs the job one restart.
- The reaper or the zygote dies: the job continues, and replaced ranks start as new processes.

A coordinator that is stopped longer than its lease costs all ranks: an elastic job starts at step
0. The end of the coordinator ends the job: with its exit code if it was asked to end; with 1 on the
other agents if it was killed.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass

SAMPLES = 24
"""Samples of a step, which its ranks share."""

KILLED = 128 + signal.SIGKILL
TERMINATED = 128 + signal.SIGTERM

GONE, ASKED = -1, -2
"""In place of a local rank: the agent itself died, or was asked to end."""

AFTER_ANOTHER = (
    "worker during a restart",
    "newcomer while it joins",
    "newcomer while it gets the state",
    "survivor while it sends the state",
    "survivor while all regroup",
)
"""A worker is killed, and then another process at a point that its death leads to."""

RANKS = ("worker", "rank 0", "two at once", "three in 50 ms")
ROUNDS = (*RANKS, "worker during a restart", "rank 0 during a commit")
AGENTS = (
    "agent",
    "coordinator agent",
    "agent and a worker of another",
    "agent asked to end",
)
ELASTIC = (*RANKS, *AFTER_ANOTHER[1:], "worker during a commit")
"""Deaths that the job must handle."""

HARMLESS = ("worker stopped", "agent stopped", "reaper", "zygote")
"""Events that must not change the outcome: a stop of some seconds, or the death of a helper."""

_HARMLESS_WEIGHTS = (3, 3, 3, 1)

LEASE_S = 5.0
"""The lease of the jobs' hosts."""

_LONG_S = (7.5, 10.0)
"""How long an agent is stopped that the others must give up: longer than lease and margin."""

_TWO = (*AFTER_ANOTHER, "two at once", "agent and a worker of another")


@dataclass(frozen=True, slots=True)
class Kill:
    """A planned kill or stop.

    Attributes:
        victim: The kind of process, and the situation.
        delay_s: Seconds after the job has made progress.
        pick: Chooses among several candidates; from 0 to 1.
        stop_s: Duration of a stop.
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
        """Whether the event must not change the outcome."""
        return self.victim in HARMLESS


@dataclass
class Death:
    """A kill that was carried out.

    Attributes:
        kill: The plan.
        at: Time of the death.
        who: The local ranks that died; `GONE` or `ASKED` for an agent.
        coordinator: Whether the agent was the coordinator.
        everyone: Whether the ranks of all hosts have ended, and with them the state in memory.
        recovery_s: Seconds until the next commit.
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
        seed: The seed of the plan.
        kind: "rounds" or "elastic".
        agents: Number of agents, each as one host.
        nproc: Ranks per agent.
        min_agents: The least number of agents of a round.
        max_restarts: The job's `--max-restarts`.
        kills: Kills in order, each after the job has recovered from the one before.
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
                return TERMINATED if ASKED in death.who else 1
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
