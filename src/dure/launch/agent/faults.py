"""Whose fault a round's end is: what went wrong in it, and which failure explains the others.

A round mostly ends with many failures, for ranks fail because others did. Agents tell of them one
by one (`Failed`), and once more, with all that is known by then, when nothing of the round is left
(`Ended`). What counts is found in three steps:

1. *The first* failure that was told. Of its process the latest report is taken, which knows more.
2. *Whom it blames.* An exception that names a peer (`PeerLost.peer`) was only the first to notice:
   that peer's own report counts instead, if the peer failed by itself (`root_cause`).
3. *A lost host.* If the blamed rank's host was lost, the host is at fault, and not the rank that
   noticed. Where no rank failed at all, the first host that was lost is.

The *blamed host* is the host of who is found so, or the lost host itself. It is counted against it
(`FailureCounter`), and a host that is blamed for too many rounds running is left out.

If the blamed rank lives, on another host that reaches the coordinator, then the network between the
two hosts is broken, and that is what people are told.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from dure.launch.agent.events import Outcome, Plan
from dure.launch.ranks.report import root_cause
from dure.launch.spec import RankResult

__all__ = ["FailureCounter", "Faults"]

_ROOM = 100_000
"""Bytes of the job's state for what ranks say of their ends; further ones say the least."""

_LINE = 120


class Faults(msgspec.Struct):
    """What went wrong in one round, as far as it was told; true if anything did.

    Attributes:
        first: The first failure of a worker.
        reports: What was told last of each rank.
        lost: Members whose hosts were lost, in that order.
        causes: How each of these was lost, where it is known.
        size: Of the reports, in bytes.
    """

    first: RankResult | None = None
    reports: dict[int, RankResult] = {}
    lost: list[str] = []
    causes: dict[str, str] = {}
    size: int = 0

    def __bool__(self) -> bool:
        return self.first is not None or bool(self.lost)

    def fail(self, worker: RankResult) -> None:
        """Take a failure; the first one counts."""
        self.first = self.first or worker

    def report(self, rank: RankResult) -> None:
        """Take what is told of a rank, in place of what was told before."""
        before = self.reports.get(rank.rank)
        size = _size(rank) - (0 if before is None else _size(before))
        if size > 0 and self.size + size > _ROOM:
            rank = _shortened(rank, before)
            size = _size(rank) - (0 if before is None else _size(before))
        self.size += size
        self.reports[rank.rank] = rank

    def lose(self, agent: str, why: str) -> None:
        """Take the loss of a member's host."""
        if agent not in self.lost:
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

    def blamed_host(self, plan: Plan) -> str:
        """Return the host to blame (`Joined.machine`)."""
        failure = self.root_cause()
        if failure is None:
            agent = self.lost[0]
        else:
            agent = self._lost_peer(plan, failure) or plan.owner(failure.rank)
        return plan.machines[plan.node_of(agent)] if agent in plan.members else ""

    def why(self, plan: Plan, endpoint: str = "") -> str:
        """Say which hosts are the reason for the round's end; empty if a rank is."""
        failure = self.root_cause()
        if failure is None:
            return f"lost {', '.join(self._how(plan, agent) for agent in self.lost)}"
        peer = None if failure.crash is None else failure.crash.peer
        owner = self._lost_peer(plan, failure)
        if owner:
            return f"lost {self._how(plan, owner)}, with rank {peer}"
        return self._unreached(plan, failure, endpoint or "the endpoint")

    def _unreached(self, plan: Plan, failure: RankResult, endpoint: str) -> str:
        """Say that a rank has given up one of another host that lived; empty if it was not so."""
        peer = None if failure.crash is None else failure.crash.peer
        other = None if peer is None else self.reports.get(peer)
        if other is None or other.host == failure.host:
            return ""
        blames_back = other.crash is not None and other.crash.peer == failure.rank
        if not blames_back and (other.crash is not None or not other.ended_by_launcher):
            return ""
        here, there = failure.host, other.host
        return (
            f"rank {failure.rank} on {here} has lost rank {peer} on {there}, which lived: "
            f"{here} and {there} do not reach each other, though both reach {endpoint} (or that "
            "rank was stopped)"
        )

    def setback(self, plan: Plan, endpoint: str = "") -> str:
        """Say in one line why the round ended."""
        failure, why = self.root_cause(), self.why(plan, endpoint)
        if failure is None or why:
            return why
        how = f"failed: {failure.exit}"
        if failure.crash is not None:
            how = f"raised {failure.crash.type}: {failure.crash.message}"
        return f"rank {failure.rank} on {failure.host} {how}"

    def defeat(self, plan: Plan, limit: str, endpoint: str = "") -> Outcome:
        """Return the outcome of a job that fails with this round, for it has come to `limit`."""
        failure, why = self.root_cause(), self.why(plan, endpoint)
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


class FailureCounter(msgspec.Struct):
    """The host that was blamed for the latest round, and for how many running."""

    host: str = ""
    rounds: int = 0

    def blame(self, host: str) -> int:
        """Take the blamed host of one more round; return how many rounds running it is that."""
        self.host, self.rounds = host, self.rounds + 1 if host == self.host else 1
        return self.rounds


def _size(rank: RankResult) -> int:
    return len(msgspec.msgpack.encode(rank))


def _shortened(rank: RankResult, before: RankResult | None) -> RankResult:
    """Return a report without its long texts, but for those that were told before."""
    crash = rank.crash
    if before is not None and before.is_process_of(rank) and before.crash is not None:
        crash = before.crash
    elif crash is not None:
        crash = replace(crash, message=crash.message[:_LINE], traceback="")
    return replace(rank, crash=crash, stack=rank.stack[:1], last=rank.last[:_LINE], progress="")
