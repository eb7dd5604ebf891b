"""The cause of a round's end: its failures, and the one that explains the others.

A round mostly ends with many failures, for ranks fail because others did. Agents report them one
by one (`Failed`), and once more, with all that is known by then, when nothing of the round is left
(`Ended`). The cause is found in three steps:

1. *The first* failure that was reported. Of its process the latest report counts, which knows more.
2. *The rank that it blames.* An exception that names a peer (`PeerLost.peer`) was only the first to
   notice: that peer's own report counts instead, if the peer failed by itself (`root_cause`).
3. *A lost host.* If the blamed rank's host was lost, the host is the cause, and not the rank that
   noticed. If no rank failed at all, the first host that was lost is.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from dure.launch.agent.events import JobOutcome, Joined, RoundPlan
from dure.launch.ranks.report import root_cause
from dure.launch.spec import RankResult

__all__ = ["Faults"]

_COMPLETE = 8
"""How many ranks' reports are kept with their long texts, for a state in etcd has limits."""

_LINE = 120


class Faults(msgspec.Struct):
    """What went wrong in one round, as far as it was reported; true if anything did.

    Attributes:
        first: The first failure of a worker.
        reports: The latest report of each rank.
        lost: Members whose hosts were lost, in that order, and how, where it is known.
    """

    first: RankResult | None = None
    reports: dict[int, RankResult] = {}
    lost: dict[str, str] = {}

    def __bool__(self) -> bool:
        return self.first is not None or bool(self.lost)

    def report(self, rank: RankResult, *, failed: bool = False) -> None:
        """Note a report of a rank, in place of an earlier one."""
        if rank.rank not in self.reports and len(self.reports) >= _COMPLETE:
            rank = _shortened(rank)
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

    def why(self, plan: RoundPlan) -> str:
        """Say which hosts are the reason for the round's end; empty if a rank is."""
        failure = self.root_cause()
        if failure is None:
            hosts = {each.agent: each for each in plan.joined}
            return f"lost {', '.join(self._how(hosts[agent]) for agent in self.lost)}"
        peer = None if failure.crash is None else failure.crash.peer
        owner = None if peer is None else plan.owner(peer)
        if owner is not None and owner.agent in self.lost:
            return f"lost {self._how(owner)}, with rank {peer}"
        return ""

    def setback(self, plan: RoundPlan) -> str:
        """Say in one line why the round ended."""
        failure, why = self.root_cause(), self.why(plan)
        if failure is None or why:
            return why
        return f"rank {failure.rank} on {failure.host} {failure.how}"

    def defeat(self, plan: RoundPlan, limit: str) -> JobOutcome:
        """Return the outcome of a job that fails with this round, for it has come to `limit`."""
        failure, why = self.root_cause(), self.why(plan)
        if why and not limit:
            why += "; no restarts are allowed (--max-restarts), so the job ends"
        code = 1 if failure is None else failure.status or 1
        return JobOutcome(code=code, why=why, failure=failure, ranks=self.ranks(), limit=limit)

    def _how(self, member: Joined) -> str:
        """Name the host of a lost member, and say how it was lost."""
        why = self.lost[member.agent]
        return f"{member.host} ({why})" if why else member.host


def _shortened(rank: RankResult) -> RankResult:
    """Return a report without its long texts."""
    crash = rank.crash
    if crash is not None:
        crash = replace(crash, message=crash.message[:_LINE], traceback="")
    return replace(rank, crash=crash, stack=rank.stack[:1], last=rank.last[:_LINE], progress="")
