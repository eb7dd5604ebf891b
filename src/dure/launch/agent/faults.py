"""Whose fault a round's end is: what went wrong in it, and which failure explains the others.

A round mostly ends with many failures, for ranks fail because others did. Agents tell of them one
by one (`Failed`), and once more, with all that is known by then, when nothing of the round is left
(`Ended`). What counts is found in three steps:

1. *The first* failure in the log. Of its process the latest report is taken, which knows more.
2. *Whom it blames.* An exception that names a peer (`PeerLost.peer`) was only the first to notice:
   that peer's own report counts instead, if the peer failed by itself (`root_cause`).
3. *A lost host.* If the blamed rank's host was lost, the host is at fault, and not the rank that
   noticed. Where no rank failed at all, the first host that was lost is.

The *culprit* is the host of who is found so, or the lost host itself. It is counted against it
(`Streak`), and the machine leaves a host out that is the culprit of too many rounds running.
"""

from __future__ import annotations

import msgspec

from dure.launch.agent.duties import Outcome, Plan
from dure.launch.ranks.report import root_cause
from dure.launch.spec import RankResult

__all__ = ["Faults", "Streak"]


class Faults(msgspec.Struct):
    """What went wrong in one round, as far as the log tells; true if anything did.

    Attributes:
        first: The first failure of a worker.
        reports: What was told last of each rank.
        lost: Members whose hosts were lost, in that order.
        causes: How each of these was lost, where it is known.
    """

    first: RankResult | None = None
    reports: dict[int, RankResult] = {}
    lost: list[str] = []
    causes: dict[str, str] = {}

    def __bool__(self) -> bool:
        return self.first is not None or bool(self.lost)

    def fail(self, worker: RankResult) -> None:
        """Take a failure; the first one counts."""
        self.first = self.first or worker

    def lose(self, agent: str, why: str) -> None:
        """Take the loss of a member's host."""
        self.lost.append(agent)
        self.causes[agent] = why

    def ranks(self) -> tuple[RankResult, ...]:
        """Return what became of all ranks, as far as they were told, by rank."""
        return tuple(self.reports[rank] for rank in sorted(self.reports))

    def root_cause(self) -> RankResult | None:
        """Return the first failure, or whom it blames, as it was told last."""
        if self.first is None:
            return None
        latest = self.reports.get(self.first.rank, self.first)  # or of who took its place
        return root_cause(latest if latest.is_process_of(self.first) else self.first, self.ranks())

    def culprit(self, plan: Plan) -> str:
        """Return the host to blame."""
        failure = self.root_cause()
        if failure is None:
            return plan.host_of(self.lost[0])
        return plan.host_of(self._lost_peer(plan, failure) or plan.owner(failure.rank) or "")

    def why(self, plan: Plan) -> str:
        """Say which hosts were lost, if that is what ended the round; empty if a rank did."""
        failure = self.root_cause()
        if failure is None:
            return f"lost {', '.join(self._how(plan, agent) for agent in self.lost)}"
        owner = self._lost_peer(plan, failure)
        return (
            f"lost {self._how(plan, owner)}, with rank {failure.crash and failure.crash.peer}"
            if owner
            else ""
        )

    def setback(self, plan: Plan) -> str:
        """Say in one line why the round ended."""
        failure, why = self.root_cause(), self.why(plan)
        if failure is None or why:
            return why
        how = f"failed: {failure.exit}"
        if failure.crash is not None:
            how = f"raised {failure.crash.type}: {failure.crash.message}"
        return f"rank {failure.rank} on {failure.host} {how}"

    def defeat(self, plan: Plan, limit: str) -> Outcome:
        """Return the outcome of a job that fails with this round, for it has come to `limit`."""
        failure, why = self.root_cause(), self.why(plan)
        if why and not limit:
            why += "; no restarts are allowed (--max-restarts), so the job ends"
        return Outcome(
            code=(failure.status if failure is not None else 1) or 1,
            why=why,
            failure=failure,
            ranks=self.ranks(),
            limit=limit,
        )

    def _how(self, plan: Plan, agent: str) -> str:
        """Name the host of a lost member, and say how it was lost."""
        why = self.causes.get(agent, "")
        return f"{plan.host_of(agent)} ({why})" if why else plan.host_of(agent)

    def _lost_peer(self, plan: Plan, failure: RankResult) -> str:
        """Return the lost member whose rank a failure blames; empty if it blames no such rank."""
        peer = None if failure.crash is None else failure.crash.peer
        owner = None if peer is None else plan.owner(peer)
        return owner if owner in self.lost else ""


class Streak(msgspec.Struct):
    """The culprit of the latest round, and of how many running."""

    host: str = ""
    rounds: int = 0

    def blame(self, host: str) -> int:
        """Take the culprit of one more round; return how many rounds running it is that."""
        self.host, self.rounds = host, self.rounds + 1 if host == self.host else 1
        return self.rounds
