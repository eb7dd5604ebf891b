"""The hosts that fell silent, and whether the rest of the job is the part that may go on.

Where a network is cut, each side sees the hosts of the other fall silent, as if they were lost. The
voters are the ranks of the last round's hosts (before the first round: of all that came), without
those of hosts that are known to have died; `dure.store.quorum` tells which part has enough of them.
The part that has not is *parted*, and waits.

A host that comes again is here, under whatever name: it has ended what it had before.

What fell silent is remembered until the next round starts, whose hosts are the voters then. That
there ever was such a round is remembered for good (`prevailed`): the others may live to this day,
and must learn that the job has gone on without them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dure.launch.agent.duties import Plan
from dure.launch.agent.events import Joined
from dure.store.quorum import may_go_on

__all__ = ["WAITS", "Parts"]

WAITS = "this part of the job may be the smaller, and waits for the other"


class Parts(msgspec.Struct):
    """Which hosts may be another part of the job.

    Attributes:
        silent: Lost since the round began, and not known to have died, by agent.
        prevailed: A round was started without silent hosts.
    """

    silent: dict[str, Joined] = {}
    prevailed: bool = False

    def __str__(self) -> str:
        return ", ".join(joined.host for joined in self.silent.values())

    @property
    def aware(self) -> bool:
        """Whether there may be another part."""
        return self.prevailed or bool(self.silent)

    def lose(self, joined: Joined) -> None:
        """Take it that a host fell silent."""
        self.silent[joined.agent] = joined

    def hear(self, host: str) -> None:
        """Take it that a host has come again."""
        self.silent = {a: lost for a, lost in self.silent.items() if lost.host != host}

    def go_on(self) -> None:
        """Take it that a round starts with those who are here."""
        self.prevailed = self.aware
        self.silent = {}

    def parted(self, plan: Plan | None, here: Sequence[Joined]) -> bool:
        """Tell whether those who fell silent may be the part of the job that goes on.

        Args:
            plan: The latest round; None before the first.
            here: The agents at hand.
        """
        hosts = {joined.host for joined in here}
        if plan is None:
            members = (*self.silent.values(), *here)
            voters = [(a.agent, a.host, a.nproc) for a in members]
        else:
            voters = list(zip(plan.members, plan.hosts, plan.nprocs, strict=True))
        return not may_go_on(
            [(n, host in hosts) for a, host, n in voters if host in hosts or a in self.silent]
        )
