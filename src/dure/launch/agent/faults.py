"""The cause of a round's end: what went wrong in it, and which failure explains the others.

A round mostly ends with many failures, for ranks fail because others did. Agents report them one
by one (`Failed`), and once more, with all that is known by then, when nothing of the round is left
(`Ended`). The cause is found in three steps:

1. *The first* failure that was reported. Of its process the latest report counts, which knows more.
2. *The rank that it blames.* An exception that names a peer (`PeerLost.peer`) was only the first to
   notice: that peer's own report counts instead, if the peer failed by itself (`root_cause`).
3. *A lost host.* If the blamed rank's host was lost, the host is the cause, and not the rank that
   noticed. If no rank failed at all, the first host that was lost is.

If the blamed rank lives, on another host that reaches the coordinator, then the network between the
two hosts is broken, and that is what the message says.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from dure.launch.agent.events import Joined, Outcome, Plan
from dure.launch.ranks.report import root_cause
from dure.launch.spec import RankResult

__all__ = ["Faults"]

_ROOM = 100_000
"""Bytes of the job's state for reports of ranks; further reports are shortened."""

_LINE = 120


class Faults(msgspec.Struct):
    """What went wrong in one round, as far as it was reported; true if anything did.

    Attributes:
        first: The first failure of a worker.
        reports: The latest report of each rank.
        lost: Members whose hosts were lost, in that order, and how, where it is known.
        size: Of the reports, in bytes.
    """

    first: RankResult | None = None
    reports: dict[int, RankResult] = {}
    lost: dict[str, str] = {}
    size: int = 0

    def __bool__(self) -> bool:
        return self.first is not None or bool(self.lost)

    def report(self, rank: RankResult, *, failed: bool = False) -> None:
        """Note a report of a rank, in place of an earlier one."""
        before = self.reports.get(rank.rank)
        others = self.size - _size(before)
        if others + _size(rank) > _ROOM:
            rank = _shortened(rank, before)
        self.size = others + _size(rank)
        self.reports[rank.rank] = rank
        if failed:
            self.first = self.first or rank

    def ranks(self) -> tuple[RankResult, ...]:
        """Return the latest reports of all ranks, by rank."""
        return tuple(self.reports[rank] for rank in sorted(self.reports))

    def root_cause(self) -> RankResult | None:
        """Return the latest report of the first failure, or of the rank that it blames."""
        if self.first is None:
            return None
        latest = self.reports.get(self.first.rank, self.first)  # or of who took its place
        return root_cause(latest if latest.is_process_of(self.first) else self.first, self.ranks())

    def why(self, plan: Plan, endpoint: str = "") -> str:
        """Say which hosts are the reason for the round's end; empty if a rank is."""
        failure = self.root_cause()
        if failure is None:
            hosts = {each.agent: each for each in plan.joined}
            return f"lost {', '.join(self._how(hosts[agent]) for agent in self.lost)}"
        owner = self._lost_peer(plan, failure)
        if owner is not None:
            return f"lost {self._how(owner)}, with rank {_peer(failure)}"
        return self._unreached(failure, endpoint or "the endpoint")

    def _unreached(self, failure: RankResult, endpoint: str) -> str:
        """Say that a rank has given up one of another host that lived; empty if it was not so."""
        peer = _peer(failure)
        other = None if peer is None else self.reports.get(peer)
        if other is None or other.host == failure.host:
            return ""
        if _peer(other) != failure.rank and (other.crash or not other.ended_by_launcher):
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
        code = 1 if failure is None else failure.status or 1
        return Outcome(code=code, why=why, failure=failure, ranks=self.ranks(), limit=limit)

    def _how(self, member: Joined) -> str:
        """Name the host of a lost member, and say how it was lost."""
        why = self.lost[member.agent]
        return f"{member.host} ({why})" if why else member.host

    def _lost_peer(self, plan: Plan, failure: RankResult) -> Joined | None:
        """Return the lost member whose rank a failure blames."""
        peer = _peer(failure)
        owner = None if peer is None else plan.owner(peer)
        return owner if owner is not None and owner.agent in self.lost else None


def _peer(failure: RankResult) -> int | None:
    """Return the rank that a failure blames."""
    return None if failure.crash is None else failure.crash.peer


def _size(rank: RankResult | None) -> int:
    return 0 if rank is None else len(msgspec.msgpack.encode(rank))


def _shortened(rank: RankResult, before: RankResult | None) -> RankResult:
    """Return a report without its long texts, except those of an earlier report."""
    crash = rank.crash
    if before is not None and before.is_process_of(rank) and before.crash is not None:
        crash = before.crash
    elif crash is not None:
        crash = replace(crash, message=crash.message[:_LINE], traceback="")
    return replace(rank, crash=crash, stack=rank.stack[:1], last=rank.last[:_LINE], progress="")
