"""What happens to the jobs of a drill: drawn from a seed, before anything is started."""

from __future__ import annotations

import random
from dataclasses import dataclass

SAMPLES = 24
"""Samples of a step, which its ranks share."""

KINDS = ("plain", "rounds", "elastic")

VICTIMS = {
    "plain": ("worker", "rank 0", "two at once", "agent"),
    "rounds": (
        "worker",
        "rank 0",
        "two at once",
        "agent",
        "agent with the store",
        "worker during a restart",
        "rank 0 during a commit",
    ),
    "elastic": (
        "worker",
        "rank 0",
        "two at once",
        "newcomer while it joins",
        "worker during a commit",
        "agent",
    ),
}


@dataclass(frozen=True, slots=True)
class Kill:
    """One act of violence: whom, and how long after the job has made progress."""

    victim: str
    delay_s: float
    pick: float
    """From 0 to 1: which of those in question."""

    @property
    def deaths(self) -> int:
        """How many processes are killed."""
        twice = ("two at once", "worker during a restart", "newcomer while it joins")
        return 2 if self.victim in twice else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One job.

    Attributes:
        seed: What it was drawn from.
        kind: plain, rounds or elastic.
        agents: How many hosts are played.
        nproc: Ranks of each.
        min_agents: Fewer hosts make no round.
        max_restarts: What the job is given.
        kills: One after the other, each after the job has recovered from the one before.
        returns: Whether another agent comes in place of one that was killed.
    """

    seed: int
    kind: str
    agents: int
    nproc: int
    min_agents: int
    max_restarts: int
    kills: tuple[Kill, ...]
    returns: bool = True

    def __str__(self) -> str:
        victims = ", ".join(kill.victim for kill in self.kills)
        return (
            f"{self.kind}, {self.agents} agents of {self.nproc}, {self.max_restarts} restarts"
            f"{'' if self.returns else ', no return'}: {victims}"
        )


def draw_plan(seed: int, kinds: tuple[str, ...] = KINDS) -> Plan:
    """Draw a job."""
    chance = random.Random(seed)
    kind = chance.choices(kinds, [1 if kind == "plain" else 3 for kind in kinds])[0]
    return {"plain": _plain, "rounds": _rounds, "elastic": _elastic}[kind](seed, chance)


def _kill(chance: random.Random, victim: str) -> Kill:
    return Kill(victim, chance.uniform(0, 0.15), chance.random())


def _plain(seed: int, chance: random.Random) -> Plan:
    kills = (_kill(chance, chance.choice(VICTIMS["plain"])),)
    return Plan(
        seed=seed, kind="plain", agents=1, nproc=3, min_agents=1, max_restarts=0, kills=kills
    )


def _rounds(seed: int, chance: random.Random) -> Plan:
    agents = chance.choice((1, 2, 2, 3))
    victims = [v for v in VICTIMS["rounds"] if agents > 1 or "agent" not in v]
    kills = tuple(_kill(chance, chance.choice(victims)) for _ in range(chance.randint(3, 6)))
    restarts = 100 if chance.random() < 0.8 else chance.randrange(len(kills))
    return Plan(
        seed=seed,
        kind="rounds",
        agents=agents,
        nproc=chance.choice((1, 2)) if agents > 1 else 3,
        min_agents=max(1, agents - 1),
        max_restarts=restarts,
        kills=kills,
    )


def _elastic(seed: int, chance: random.Random) -> Plan:
    agents = chance.choice((1, 1, 2))
    victims = VICTIMS["elastic"][:-1]
    kills = [_kill(chance, chance.choice(victims)) for _ in range(chance.randint(4, 7))]
    if chance.random() < 0.5:
        kills.append(_kill(chance, "agent"))  # on one host the last: nobody replaces ranks then
    return Plan(
        seed=seed,
        kind="elastic",
        agents=agents,
        nproc=4 // agents,
        min_agents=1,
        max_restarts=100,
        kills=tuple(kills),
        returns=False,
    )
