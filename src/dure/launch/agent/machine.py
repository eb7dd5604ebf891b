"""When workers are started, stopped and started again, on all hosts: a pure state machine.

Every agent keeps a machine of its own and feeds it the same *log* of events (`events`), which lies
in the job's store. What a machine says is a function of the events alone, so all agents come to the
same decisions, nobody leads, and nobody's death matters: who has the log has the state.

            min hosts, and the last call is over            all members succeeded
    GATHERING ─────────────────────────▶ RUNNING ─────────────────────────────▶ OVER
        ▲ │                                 │ a worker failed, a host was lost,   ▲
        │ │ join timeout                    │ left or came                        │
        │ └──────────────────────────────── │ ───────────────────────────────────▶│
        │                                   ▼                                     │
        └──────── restarts are left ──── STOPPING ──── none is left ──────────────┘
                 (or none is needed)    until every member says that nothing
                                        of the round is left on its host

**Rounds.** A round is one start of all workers. Its members are the hosts at hand, between `min`
and `max`, in the order that `lineup` tells. Further hosts are spares, who stand in when a member is
gone.

**What counts as a restart.** A worker's failure and a host's loss do, each round once, for the
whole job. Hosts that come while a round has fewer than `max`, or take their leave in order, cause a
new round that does not count. A host that leaves a job of a fixed number of hosts ends it.

**Whose fault.** `faults` finds the one failure that explains a round's end, and the host to blame.
A host to whom this happens `exclude_after` rounds running is left out, if enough others are there.

**Parts.** Where hosts fell silent, the network may be cut, and they may be another part of the job.
A part without the quorum (`parts`) starts no round, and waits for the other until the join timeout.

The machine has no clock. Where time matters it names a timer (`Timer`); the first agent whose
clock runs out writes `Expired` into the log. Late ones name a timer that is over, and mean nothing.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from dure.launch.agent.duties import (
    Duty,
    Leave,
    Outcome,
    Plan,
    Prepare,
    Rejoin,
    Stop,
    Timer,
    Wait,
    Work,
)
from dure.launch.agent.events import (
    Ended,
    Event,
    Expired,
    Failed,
    Finished,
    Joined,
    Left,
    Lost,
    Ready,
    Refused,
    Succeeded,
)
from dure.launch.agent.faults import Faults, Streak
from dure.launch.agent.lineup import line_up
from dure.launch.agent.parts import WAITS, Parts
from dure.launch.agent.settings import Settings
from dure.launch.agent.vain import cut_off, too_few

__all__ = ["Machine", "Phase"]

_NOTES = 100
"""How many notes are kept: hosts may come, and be refused, for as long as the job runs."""


class Phase(Enum):
    """Where the job is."""

    GATHERING = "waiting for enough hosts"
    RUNNING = "a round runs"
    STOPPING = "the members of a round end their workers"
    OVER = "the job has ended"


class Machine(msgspec.Struct):
    """The state of a job; `apply` takes the next event, `duty` tells an agent what to do now.

    It is one plain value: packed with msgpack and read back, it goes on as if nothing had been
    (`dure.launch.agent.chronicle`). So all its fields are of types that msgspec can read.

    Args:
        settings: What the user decided.
    """

    settings: Settings
    phase: Phase = Phase.GATHERING
    plan: Plan | None = None  # of the latest round
    restarts: int = 0
    setback: str = ""  # why the last round ended, for people
    excluded: frozenset[str] = frozenset()
    outcome: Outcome | None = None
    notes: list[str] = []  # what people should hear of other hosts
    _agents: dict[str, Joined] = {}  # at hand, in the order they came
    _known: set[str] = set()
    _ready: Ready | None = None
    _gathering: int = 0  # how often the job has gathered: sets its timers apart
    _succeeded: set[str] = set()
    _ended: set[str] = set()
    _faults: Faults = msgspec.field(default_factory=Faults)
    _leaving: set[str] = set()  # members that end their workers, and then leave
    _dismissed: Left | None = None  # whose leave ends the job
    _parts: Parts = msgspec.field(default_factory=Parts)
    _streak: Streak = msgspec.field(default_factory=Streak)

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents at hand, in the order they came."""
        return tuple(self._agents)

    @property
    def present(self) -> tuple[Joined, ...]:
        """How the agents at hand have joined, in that order."""
        return tuple(self._agents.values())

    @property
    def failed(self) -> bool:
        """Whether a worker of the present round has failed."""
        return self._faults.first is not None

    @property
    def missing(self) -> int:
        """How many hosts must still come before a round can start."""
        return max(0, self.settings.min_hosts - len(self._chosen()))

    @property
    def departing(self) -> bool:
        """Whether the present round ends because a host takes its leave."""
        return bool(self._leaving) or self._dismissed is not None

    @property
    def dismissed(self) -> bool:
        """Whether the job ends because a host takes its leave."""
        return self._dismissed is not None

    @property
    def parted(self) -> bool:
        """Whether those who fell silent may be the part of the job that goes on."""
        return self.settings.quorum and self._parts.parted(self.plan, self.present)

    @property
    def prevails(self) -> bool:
        """Whether this is the part that goes on, though others may live."""
        return self.settings.quorum and self._parts.aware and not self.parted

    def knows(self, agent: str) -> bool:
        """Tell whether an agent has joined, be it at hand or not."""
        return agent in self._known

    def host(self, agent: str) -> str:
        """Return the name of an agent's host."""
        return self._agents[agent].host if agent in self._agents else agent

    def apply(self, event: Event) -> None:
        """Take the next event of the log; one that comes too late changes nothing."""
        if self.phase is Phase.OVER:
            return
        match event:
            case Joined():
                if event.agent not in self._known:  # nobody comes back under the same name
                    self._known.add(event.agent)
                    self._agents[event.agent] = event
                    self._parts.hear(event.host)
            case Left() | Lost():
                self._gone(event)
            case Refused():
                self._note(f"{event.host} came with other terms and was refused: {event.why}")
            case Ready():
                self._got_ready(event)
            case Expired():
                self._expired(event.timer)
            case Failed() | Finished() | Succeeded() | Ended():
                if self._is_current(event):
                    self._told(event)
        self._settle()

    def duty(self, agent: str) -> Duty:
        """Return what `agent` has to do now; the same until the next event."""
        joined = self._agents.get(agent)
        if self.phase is Phase.OVER and self.outcome is not None:
            return Leave(self.outcome)
        if joined is None:
            return Rejoin()
        if joined.host in self.excluded:
            return Leave(Outcome(code=1, why=f"host {joined.host} failed first too often"))
        plan = self.plan
        if self.phase is Phase.GATHERING or plan is None:
            return Wait(self._timer())
        if agent not in plan.members or agent in self._ended | self._succeeded:
            return Wait()
        if self.phase is Phase.STOPPING:
            return Stop(plan)
        if self._ready is None:
            first = next(a for a in plan.members if a in self._agents)  # rank 0's, if not elastic
            return Prepare(plan) if agent == first else Wait()
        return Work(plan, self._ready, self._replacements(agent))

    # --- what subclasses see differently ----------------------------------------------------

    def _replacements(self, agent: str) -> tuple[tuple[int, int], ...]:
        """Return the replacements due on an agent: none, for all workers start anew instead."""
        return ()

    def _told(self, event: Failed | Finished | Succeeded | Ended) -> None:
        """Take what a member says of the present round."""
        if isinstance(event, Failed):
            if self._dismissed is None:  # otherwise it fails because it was told to end
                self._faults.fail(event.worker)
            self._faults.reports.setdefault(event.worker.rank, event.worker)
        elif isinstance(event, Succeeded) and self.phase is Phase.RUNNING:
            self._succeeded.add(event.agent)
        elif isinstance(event, Succeeded | Ended):
            self._ended.add(event.agent)
            if isinstance(event, Ended):
                self._faults.reports.update((rank.rank, rank) for rank in event.ranks)
        if event.agent in self._leaving & (self._ended | self._succeeded):
            self._forget(event.agent)

    def _run_on(self) -> None:
        """While RUNNING: find a reason to stop, or the end."""
        assert self.plan is not None
        if all(agent in self._succeeded for agent in self.plan.members):
            self._end(Outcome(code=0, ranks=self._faults.ranks()))
        elif self._faults or self._dismissed or self._changed():
            self.phase = Phase.STOPPING

    def _round_closed(self) -> None:
        """Nothing of a stopped round is left: gather for the next, or end."""
        if self._dismissed is not None and self._faults.first is None:
            self._end(Outcome(code=self._dismissed.code, why=self._dismissed.why))
            return
        if self._faults:
            assert self.plan is not None
            if self._dismissed is not None or self.restarts >= self.settings.max_restarts:
                self._end(self._defeat())
                return
            self.restarts += 1
            self.setback = self._faults.setback(self.plan)
            self._blame(self._faults.culprit(self.plan))
        else:
            self.setback = "hosts came or left"
        if self.parted:
            self._note(f"nothing is heard of {self._parts}; {WAITS}")
        self._gathering += 1
        self.phase = Phase.GATHERING

    # --- the steps ---------------------------------------------------------------------------

    def _settle(self) -> None:
        """Go from phase to phase as far as the present state demands."""
        before = None
        while before is not self.phase:
            before = self.phase
            if self.phase is Phase.GATHERING:
                self._gather()
            elif self.phase is Phase.RUNNING:
                self._run_on()
            elif self.phase is Phase.STOPPING and self._all_ended():
                self._round_closed()

    def _gather(self) -> None:
        if self._dismissed is not None:
            self._end(Outcome(code=self._dismissed.code, why=self._dismissed.why))
            return
        chosen = self._chosen()
        enough = not self.missing and not self.parted
        if enough and (self.plan is not None or len(chosen) == self.settings.max_hosts):
            self._start(chosen)

    def _timer(self) -> Timer:
        if self.missing or self.parted:
            return Timer(f"join {self._gathering}", self.settings.join_timeout_s)
        return Timer(f"last call {self._gathering}", self.settings.last_call_s)

    def _expired(self, timer: str) -> None:
        if self.phase is not Phase.GATHERING or timer != self._timer().name:
            return
        if not self.missing and not self.parted:
            self._start(self._chosen())
        else:
            self._end(self._given_up())

    def _given_up(self) -> Outcome:
        """Return the outcome of a job that has waited in vain."""
        lost = self._defeat() if self._faults else Outcome(code=1)
        if self.parted:
            why = cut_off(self.settings, self._parts)
        else:
            why = too_few(self.settings, self.present, self._chosen())
        return Outcome(code=lost.code, why=why, failure=lost.failure, ranks=lost.ranks)

    def _chosen(self) -> tuple[str, ...]:
        """Return who would take part in a round that started now, in the order of their nodes."""
        before = () if self.plan is None else self.plan.members
        willing = [
            a
            for a in self._agents.values()
            if a.host not in self.excluded and a.agent not in self._leaving
        ]
        return line_up(willing, before, self.settings.max_hosts)

    def _start(self, members: tuple[str, ...]) -> None:
        self.plan = Plan(
            number=0 if self.plan is None else self.plan.number + 1,
            members=members,
            hosts=tuple(self._agents[agent].host for agent in members),
            nprocs=tuple(self._agents[agent].nproc for agent in members),
        )
        self._ready = None
        self._succeeded, self._ended = set(), set()
        self._faults = Faults()
        self._parts.go_on()
        self.phase = Phase.RUNNING

    def _is_current(self, event: Failed | Finished | Succeeded | Ended) -> bool:
        """Whether it is of this round, and not of one that a cut-off part had by that number."""
        plan = self.plan
        return plan is not None and event.round == plan.number and event.agent in self._agents

    def _got_ready(self, event: Ready) -> None:
        plan = self.plan
        if plan is not None and plan.number == event.round and event.agent in plan.members:
            self._ready = self._ready or event

    def _gone(self, event: Left | Lost) -> None:
        agent = event.agent
        if agent not in self._agents:
            return
        plan = self.plan if self.phase is not Phase.GATHERING else None
        working = plan is not None and agent in {*plan.members} - self._ended - self._succeeded
        if isinstance(event, Lost):
            if event.silent:
                self._parts.lose(self._agents[agent])
            if working and agent not in self._leaving:
                self._faults.lose(agent, event.why)
            self._forget(agent)
            return
        fixed = self.settings.min_hosts == self.settings.max_hosts
        if (fixed and agent in self._chosen()) or len(self._agents) == 1:
            self._dismissed = self._dismissed or event
        if working:
            self._leaving.add(agent)  # until it says that nothing of the round is left there
        else:
            self._forget(agent)

    def _note(self, what: str) -> None:
        if what not in self.notes:
            self.notes = [*self.notes, what][-_NOTES:]

    def _forget(self, agent: str) -> None:
        self._agents.pop(agent, None)
        self._leaving.discard(agent)

    def _changed(self) -> bool:
        """Whether a host came that a new round would have, or a member has left."""
        assert self.plan is not None
        members = self.plan.members
        here = self._agents.keys() - self._leaving
        if any(a not in here and a not in self._succeeded for a in members):
            return True
        full = len(members) >= self.settings.max_hosts
        return not full and not self._succeeded and len(self._chosen()) > len(members)

    def _all_ended(self) -> bool:
        assert self.plan is not None
        over = self._ended | self._succeeded
        return all(a in over or a not in self._agents for a in self.plan.members)

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.phase = Phase.OVER

    def _defeat(self) -> Outcome:
        """Return the outcome of a job that failed for good."""
        assert self.plan is not None
        return self._faults.defeat(self.plan, self._limit())

    def _limit(self) -> str:
        """Say which limit of the user's lets the job fail."""
        most = self.settings.max_restarts
        return f"restarts: {self.restarts} of {most} used" if most else ""

    def _blame(self, host: str) -> None:
        """Count against a host, and leave it out if it has failed too often."""
        times = self._streak.blame(host)
        others = [a for a in self._agents.values() if a.host not in self.excluded | {host}]
        if times >= self.settings.exclude_after and len(others) >= self.settings.min_hosts:
            self.excluded |= {host}
