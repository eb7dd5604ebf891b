"""The state of an elastic job, whose program survives the deaths of its ranks by itself.

There is one round, which grows. A worker that dies is replaced while restarts are left, and the
others are not touched; an agent that comes later starts its workers as newcomers, with node and
rank numbers that no host had before; an agent that is lost has no workers any more (its reaper sees
to that, or its deadline), and is only noted. Which ranks train together is the program's business
(`dure.elastic`).

The job ends when no worker lives: well if one of them ended well. It is ended when fewer than
`min_ranks` live and none can be replaced, or when a host leaves that the job needs. Once a worker
has ended well the program is on its way out: no worker is replaced any more, and few may be left.
"""

from __future__ import annotations

import msgspec

from dure.launch.agent.events import (
    Action,
    Ended,
    Failed,
    Finished,
    JobOutcome,
    Joined,
    Left,
    Lost,
    OfRound,
    Replacement,
    RoundPlan,
    RunRound,
)
from dure.launch.agent.state import JobPhase, JobState

__all__ = ["ElasticState"]

_NOTES = 8
"""How many notes are kept: hosts come and are lost for as long as the job runs."""

Slot = tuple[str, int]
"""A place for a worker: the agent, and the local rank there."""


class ElasticState(JobState, tag="elastic"):
    """The state of an elastic job; otherwise as `JobState`."""

    _alive: set[Slot] = msgspec.field(default_factory=set[Slot])
    _finished: set[Slot] = msgspec.field(default_factory=set[Slot])
    _replaced: dict[Slot, Replacement] = msgspec.field(default_factory=dict[Slot, Replacement])
    _notes: tuple[tuple[str, str], ...] = ()  # the last hosts that were lost, by agent

    @property
    def outline(self) -> tuple[object, ...]:
        return *super().outline, self._notes

    def action(self, agent: str) -> Action:
        action = super().action(agent)
        if not isinstance(action, RunRound):
            return action
        mine = [due for (owner, _), due in self._replaced.items() if owner == agent]
        replaced = tuple(sorted(mine, key=lambda due: due.local_rank))
        return msgspec.structs.replace(action, replaced=replaced, notes=self._notes)

    def _start(self, chosen: list[Joined]) -> None:
        super()._start(chosen)
        for joined in chosen:
            self._welcome(joined)

    def _welcome(self, joined: Joined) -> None:
        self._alive.update((joined.agent, local) for local in range(joined.nproc))

    def _note_round(self, event: OfRound) -> None:
        if isinstance(event, Finished):
            self._alive.discard((event.agent, event.local_rank))
            self._finished.add((event.agent, event.local_rank))
        elif isinstance(event, Failed):
            self._worker_failed(event)
        elif isinstance(event, Ended):
            super()._note_round(event)

    def _worker_failed(self, event: Failed) -> None:
        slot = event.agent, event.local_rank
        before = self._replaced.get(slot)
        times = 0 if before is None else before.times
        if slot not in self._alive or event.times != times:
            return
        self._faults.report(event.worker, failed=True)
        ending = self.phase is not JobPhase.RUNNING or self._finished
        if ending or self.restarts >= self.settings.max_restarts:
            self._alive.discard(slot)
            return
        self.restarts += 1
        self._replaced[slot] = Replacement(event.local_rank, times + 1, self.restarts)

    def _limit(self) -> str:
        spent, least = super()._limit(), self.settings.min_ranks
        if least == 1 or len(self._alive) >= least:
            return spent
        return ", ".join(filter(None, (f"fewer than --min-ranks {least} live", spent)))

    def _gone(self, event: Left | Lost) -> None:
        lost = self._agents.get(event.agent)
        if isinstance(event, Lost) and lost is not None:
            note = f"lost {lost.host} ({event.why}); the others continue"
            self._notes = (*self._notes, (event.agent, note))[-_NOTES:]
        super()._gone(event)

    def _run_on(self) -> None:
        here = self._agents.keys() - self._leaving
        self._alive = {slot for slot in self._alive if slot[0] in here}
        if self._dismissed is not None:
            self.phase = JobPhase.STOPPING
            return
        self._let_in()
        too_few = not self._finished and len(self._alive) < self.settings.min_ranks
        if too_few or not self._alive:
            self.phase = JobPhase.STOPPING

    def _let_in(self) -> None:
        """Add the agents that have come, as far as there is room."""
        plan = self.plan
        if plan is None or self._finished:
            return
        for joined in self._agents.values():
            here = [agent for agent in plan.members if agent in self._agents]
            if joined.agent not in plan.members and len(here) < self.settings.max_hosts:
                plan = RoundPlan(plan.number, (*plan.joined, joined))
                self._welcome(joined)
        self.plan = plan

    def _round_closed(self) -> None:
        if self._dismissed is not None:
            self._end(JobOutcome(code=self._dismissed.code, why=self._dismissed.why))
        elif self._finished:
            self._end(JobOutcome(code=0, failure=self._faults.root_cause()))
        else:
            self._end(self._defeat())
