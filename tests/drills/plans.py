"""What happens to the jobs of a drill: drawn from a seed, before anything is started."""

from __future__ import annotations

import random
from dataclasses import dataclass

SAMPLES = 24
"""Samples of a step, which its ranks share."""

KINDS = ("plain", "rounds", "elastic")

VICTIMS = {
    "plain": ("worker", "rank 0", "two at once", "three in 50 ms", "agent", "agent asked to end"),
    "rounds": (
        "worker",
        "rank 0",
        "two at once",
        "three in 50 ms",
        "agent",
        "coordinator agent",
        "agent and a worker of another",
        "agent asked to end",
        "worker during a restart",
        "rank 0 during a commit",
    ),
    "elastic": (
        "worker",
        "rank 0",
        "two at once",
        "three in 50 ms",
        "newcomer while it joins",
        "newcomer while it gets the state",
        "survivor while it sends the state",
        "survivor while all regroup",
        "worker during a commit",
    ),
}
"""Those whose deaths the job must deal with. Of an elastic job's agents see `_elastic`."""

HARMLESS = ("worker stopped", "agent stopped", "reaper", "zygote")
"""What must change nothing: who is stopped goes on after a while, and helpers may die."""

_HARMLESS_WEIGHTS = (3, 3, 3, 1)

_LONG_S = (6.5, 9.0)
"""For so long an agent is stopped whom the others are to give up: longer than lease and margin."""

AFTER_ANOTHER = (
    "worker during a restart",
    "newcomer while it joins",
    "newcomer while it gets the state",
    "survivor while it sends the state",
    "survivor while all regroup",
)
"""A worker is killed, and somebody else at what comes of that."""

_TWO = (
    *AFTER_ANOTHER,
    "two at once",
    "agent and a worker of another",
    "worker, and the zygote that forks",
    "agent and reaper",
)


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
        zygote: Whether ranks are forked.
    """

    seed: int
    kind: str
    agents: int
    nproc: int
    min_agents: int
    max_restarts: int
    kills: tuple[Kill, ...]
    returns: bool = True
    zygote: bool = True

    def __str__(self) -> str:
        victims = ", ".join(kill.victim for kill in self.kills)
        return (
            f"{self.kind}, {self.agents} agents of {self.nproc}, {self.max_restarts} restarts"
            f"{'' if self.returns else ', no return'}: {victims}"
        )


def draw_plan(seed: int, kinds: tuple[str, ...] = KINDS, more: int = 1) -> Plan:
    """Draw a job; most have `more` times as many kills as usual."""
    chance = random.Random(seed)
    kind = chance.choices(kinds, [1 if kind == "plain" else 3 for kind in kinds])[0]
    if kind == "plain":
        return _plain(seed, chance)
    return {"rounds": _rounds, "elastic": _elastic}[kind](seed, chance, more)


def _kill(chance: random.Random, victim: str) -> Kill:
    stop_s = chance.uniform(0.2, 2.5)
    if victim == "agent stopped" and chance.random() < 0.5:
        stop_s = chance.uniform(*_LONG_S)
    return Kill(victim, chance.uniform(0, 0.15), chance.random(), stop_s)


def _mixed(chance: random.Random, victims: list[str], least: int, most: int) -> list[Kill]:
    """Draw some kills, and harmless acts between them."""
    kills: list[Kill] = []
    for _ in range(chance.randint(least, most)):
        if chance.random() < 0.25:
            kills.append(_kill(chance, chance.choices(HARMLESS, _HARMLESS_WEIGHTS)[0]))
        if chance.random() < 0.03:
            kills.append(_kill(chance, "worker, and the zygote that forks"))
        kills.append(_kill(chance, chance.choice(victims)))
    return kills


def _plain(seed: int, chance: random.Random) -> Plan:
    return Plan(
        seed=seed,
        kind="plain",
        agents=1,
        nproc=3,
        min_agents=1,
        max_restarts=0,
        kills=tuple(_mixed(chance, list(VICTIMS["plain"]), 1, 1)[-2:]),
        zygote=chance.random() < 0.3,
    )


def _rounds(seed: int, chance: random.Random, more: int) -> Plan:
    agents = chance.choice((1, 2, 2, 3))
    victims = [v for v in VICTIMS["rounds"] if agents > 1 or "agent" not in v]
    kills = _mixed(chance, victims, 3 * more, 6 * more)
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
        zygote=any("zygote" in kill.victim for kill in kills),  # which has torch to import
    )


def _elastic(seed: int, chance: random.Random, more: int) -> Plan:
    agents = chance.choice((1, 1, 2))
    kills = _mixed(chance, list(VICTIMS["elastic"]), 4 * more, 7 * more)
    last = ["agent", "coordinator agent", "agent asked to end"]
    if agents == 1:
        last = ["agent", "agent and reaper", "agent asked to end"]
    if chance.random() < 0.6:
        kills.append(_kill(chance, chance.choice(last)))
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
