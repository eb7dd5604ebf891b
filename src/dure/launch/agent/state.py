"""The job's state: when workers are started, stopped and started again, on all hosts.

It is a pure state machine and one plain value. The coordinator holds it (`coordinator`), or etcd
(`etcd`): agents report events, which are applied to it, and each agent does what its `action` is.
So all agents follow the same decisions, and none needs to see every event.

            min hosts, and the last call is over            all members succeeded
    GATHERING ─────────────────────────▶ RUNNING ─────────────────────────────▶ OVER
        ▲ │                                 │ a worker failed, a host was lost,   ▲
        │ │ join timeout                    │ left or came                        │
        │ └──────────────────────────────── │ ───────────────────────────────────▶│
        │                                   ▼                                     │
        └──────── restarts are left ──── STOPPING ──── none is left ──────────────┘
                 (or none is needed)    until every member has reported that
                                        nothing of the round is left on its host

**Rounds.** A round is one start of all workers. Its members are the hosts at hand, between `min`
and `max`, in the order of `assign_nodes`. Further hosts are spares, which replace members that are
gone.

**What counts as a restart.** A worker's failure and a host's loss do, once per round and
job. Hosts that come while a round has fewer than `max`, or leave in order, cause a new round
that does not count. The job ends when the host that coordinates leaves, or the last one, or, after
the first round has begun, one of a job of a fixed number of hosts for which there is no spare.

The state has no clock. Where time matters (the join timeout, the last call, a pause before a
restart) it names a timer (`Idle.timer`); the first agent whose timer runs out reports `Expired`.
Reports of an expired timer are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

import msgspec

from dure.launch.agent.events import (
    Action,
    Ended,
    Event,
    Expired,
    Failed,
    Finished,
    Idle,
    JobOutcome,
    Joined,
    Leave,
    Left,
    Lost,
    OfRound,
    Rejoin,
    RoundPlan,
    RunRound,
    Settings,
    Stop,
)
from dure.launch.agent.faults import Faults
from dure.launch.backoff import restart_delay
from dure.launch.ranks.environment import Round

__all__ = ["JobPhase", "JobState", "assign_nodes"]

_QUIET_S = 3.0
"""How long agents wait for other hosts before they report that to the user."""

_NAMED = 8
"""How many hosts' names an agent gets, unless it is node 0."""


class JobPhase(Enum):
    """Where the job is."""

    GATHERING = "waiting for enough hosts"
    RUNNING = "a round runs"
    STOPPING = "the members of a round end their workers"
    OVER = "the job has ended"


class JobState(msgspec.Struct, tag="rounds"):
    """The state of a job; `apply` takes an event, `action` returns what an agent has to do now.

    It is packed with msgpack and read back, so all its fields are of types that msgspec can read.
    """

    settings: Settings
    phase: JobPhase = JobPhase.GATHERING
    plan: RoundPlan | None = None  # of the latest round
    restarts: int = 0
    setback: str = ""  # why the last round ended, for people
    outcome: JobOutcome | None = None
    _agents: dict[str, Joined] = {}  # at hand, in the order they came
    _gathering: int = 0  # how often the job has gathered: sets its timers apart
    _early: bool = False  # the present round failed soon after its start
    _short_rounds: int = 0  # how many rounds in a row did
    _delay_s: float = 0.0  # the pause before this round
    _pauses: bool = False  # it is not over yet
    _succeeded: set[str] = set()  # members all of whose workers have succeeded
    _ended: set[str] = set()  # members that have none left, for another reason
    _faults: Faults = msgspec.field(default_factory=Faults)
    _leaving: set[str] = set()  # members that end their workers, and then leave
    _dismissed: Left | None = None  # the leave that ends the job

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents at hand, in the order they came."""
        return tuple(self._agents)

    @property
    def failed(self) -> bool:
        """Whether a worker of the present round has failed."""
        return self._faults.first is not None

    @property
    def missing(self) -> bool:
        """Whether hosts must still come before a round can start."""
        return len(self._chosen()) < self.settings.min_hosts

    @property
    def departing(self) -> bool:
        """Whether the present round ends because a host leaves in order."""
        return bool(self._leaving) or self._dismissed is not None

    @property
    def outline(self) -> tuple[object, ...]:
        """What decides the actions of all agents.

        While it is the same, an event changes only the action of the agent that it is about.
        """
        timer = self._timer().timer if self.phase is JobPhase.GATHERING else ""
        return self.phase, timer, self.plan, self.failed, self.departing

    def apply(self, event: Event) -> None:
        """Apply an event; one that comes too late, or again, changes nothing."""
        if self.phase is JobPhase.OVER:
            return
        match event:
            case Joined():
                self._agents.setdefault(event.agent, event)
            case Left() | Lost():
                self._gone(event)
            case Expired():
                self._expired(event.timer)
            case Failed() | Finished() | Ended():
                plan = self.plan
                if plan is not None and event.round == plan.number and event.agent in self._agents:
                    self._note_round(event)
        self._settle()

    def action(self, agent: str) -> Action:
        """Return what `agent` has to do now; the same until the next event."""
        if self.phase is JobPhase.OVER and self.outcome is not None:
            return Leave(self._outcome_for(agent, self.outcome))
        if agent not in self._agents:
            return Rejoin()
        plan = self.plan
        if self.phase is JobPhase.GATHERING or plan is None:
            return self._timer()
        if agent not in self._at_work():
            stops = self.phase is JobPhase.STOPPING  # the next round may have room for it
            return Idle(line="" if stops else self._why_spare(agent, plan))
        if self.phase is JobPhase.STOPPING:
            return Stop(plan.number, self.failed, self.departing)
        return self._work(plan, agent)

    def _work(self, plan: RoundPlan, agent: str) -> RunRound:
        node = plan.members.index(agent)
        named = plan.joined if node == 0 else plan.joined[:_NAMED]
        part = Round(
            number=plan.number,
            node=node,
            host=plan.joined[node].host,
            nproc=plan.joined[node].nproc,
            num_hosts=len(plan.joined),
            first_rank=sum(each.nproc for each in plan.joined[:node]),
            world_size=sum(each.nproc for each in plan.joined),
            hosts=tuple(each.host for each in named),
            nprocs=tuple(each.nproc for each in named),
            master_addr=plan.joined[0].address,
            master_port=plan.joined[0].port,
            store=self.settings.store,
        )
        if plan.number == 0:
            return RunRound(part)
        return RunRound(part, self.setback, self.restarts, self._delay_s)

    def _outcome_for(self, agent: str, outcome: JobOutcome) -> JobOutcome:
        """Return the outcome without what only node 0 shows: the results of all ranks."""
        shows = self.plan is not None and self.plan.members[:1] == (agent,)
        return outcome if shows else replace(outcome, ranks=())

    def _why_spare(self, agent: str, plan: RoundPlan) -> str:
        """Say why an agent at hand has no part in a round; empty if it has, or leaves."""
        mine = self._agents[agent]
        if agent in plan.members or agent in self._leaving:
            return ""
        for each in plan.joined:
            if (each.host, each.address) == (mine.host, mine.address):
                where = f" at {self.settings.endpoint}" if self.settings.endpoint else ""
                return (
                    f"another launcher of this host takes part in the job{where}; this one waits "
                    "as a spare (a job of its own needs another --rdzv-endpoint)"
                )
        hosts = f"{len(plan.joined)} host{'s' if len(plan.joined) > 1 else ''}"
        return f"the job runs on {hosts}; this host waits as a spare"

    # --- what subclasses see differently ----------------------------------------------------

    def _note_round(self, event: OfRound) -> None:
        """Note an event of the present round."""
        if isinstance(event, Failed):
            ending = self._dismissed is not None  # then it fails because it was asked to end
            self._early = self._early or event.early
            if event.worker.rank not in self._faults.reports:
                self._faults.report(event.worker, failed=not ending)
        elif isinstance(event, Ended):
            well = event.well and self.phase is JobPhase.RUNNING
            (self._succeeded if well else self._ended).add(event.agent)
            for rank in event.ranks:
                self._faults.report(rank)
            if event.agent in self._leaving:
                self._forget(event.agent)

    def _run_on(self) -> None:
        """While RUNNING: find a reason to stop, or the end."""
        assert self.plan is not None
        if all(agent in self._succeeded for agent in self.plan.members):
            self._end(JobOutcome(code=0))
        elif self._faults or self._dismissed or self._changed():
            self.phase = JobPhase.STOPPING

    def _round_closed(self) -> None:
        """Nothing of a stopped round is left: gather for the next, or end."""
        if self._dismissed is not None and self._faults.first is None:
            self._end(JobOutcome(code=self._dismissed.code, why=self._dismissed.why))
            return
        if self._faults:
            assert self.plan is not None
            if self._dismissed is not None or self.restarts >= self.settings.max_restarts:
                self._end(self._defeat())
                return
            self.restarts += 1
            self.setback = self._faults.setback(self.plan)
            self._short_rounds = self._short_rounds + 1 if self._early else 0
            self._delay_s = restart_delay(self._short_rounds, self.settings.restart_delay_s)
            self._pauses = self._delay_s > 0
        else:
            self._delay_s = 0.0
            self.setback = "hosts came or left"
        self._gathering += 1
        self.phase = JobPhase.GATHERING

    # --- the steps ---------------------------------------------------------------------------

    def _settle(self) -> None:
        """Go from phase to phase as far as the present state demands."""
        before = None
        while before is not self.phase:
            before = self.phase
            if self.phase is JobPhase.GATHERING:
                self._gather()
            elif self.phase is JobPhase.RUNNING:
                self._run_on()
            elif self.phase is JobPhase.STOPPING and not self._at_work():
                self._round_closed()

    def _gather(self) -> None:
        if self._dismissed is not None:
            self._end(JobOutcome(code=self._dismissed.code, why=self._dismissed.why))
            return
        chosen = self._chosen()
        if self.missing or self._pauses:
            return
        if self.plan is not None or len(chosen) == self.settings.max_hosts:
            self._start(chosen)

    def _timer(self) -> Idle:
        """Return what hosts wait for before the next round."""
        settings = self.settings
        if self._pauses:
            line = f"{self.setback}; the next round starts in {self._delay_s:g} s"
            return Idle(f"restart {self._gathering}", self._delay_s, line)
        if not self.missing:
            return Idle(f"last call {self._gathering}", settings.last_call_s)
        why = f"{self.setback}; " if self.setback else ""
        line = (
            f"{why}waiting at {settings.endpoint} until {settings.min_hosts} hosts have joined (at "
            f"most {settings.join_timeout_s:g} s){_why_alone(settings.endpoint)}"
        )
        return Idle(f"join {self._gathering}", settings.join_timeout_s, line, _QUIET_S)

    def _expired(self, timer: str) -> None:
        if self.phase is not JobPhase.GATHERING or timer != self._timer().timer:
            return
        if self._pauses:
            self._pauses = False
            return
        if not self.missing:
            self._start(self._chosen())
            return
        lost = self._defeat() if self._faults else JobOutcome(code=1)
        self._end(replace(lost, why=self._too_few(), limit=""))

    def _too_few(self) -> str:
        """Return the reason: too few hosts came."""
        hosts = [each.host for each in self._chosen()]
        settings = self.settings
        why = (
            f"too few hosts came to {settings.endpoint or 'the endpoint'} within "
            f"{settings.join_timeout_s:g} s: {len(hosts)} of {settings.min_hosts} "
            f"({', '.join(hosts) or 'none'})"
        )
        if len(hosts) < len(self._agents):
            return f"{why}; other hosts used a node rank that was already in use"
        return _why_alone(settings.endpoint, why) or (
            f"{why}; start the same command on the other hosts, and see there that this port can "
            "be reached and that --nnodes is the same"
        )

    def _chosen(self) -> list[Joined]:
        """Return the hosts of a round that started now, in the order of their nodes."""
        before = () if self.plan is None else self.plan.members
        willing = [a for a in self._agents.values() if a.agent not in self._leaving]
        return assign_nodes(willing, before, self.settings.max_hosts)

    def _start(self, chosen: list[Joined]) -> None:
        number = 0 if self.plan is None else self.plan.number + 1
        self.plan = RoundPlan(number, tuple(chosen))
        self._succeeded, self._ended = set(), set()
        self._faults, self._early = Faults(), False
        self.phase = JobPhase.RUNNING

    def _at_work(self) -> set[str]:
        """Return the members at hand that have not reported that nothing of the round is left."""
        if self.plan is None or self.phase is JobPhase.GATHERING:
            return set()
        done = self._ended | self._succeeded
        return {agent for agent in self.plan.members if agent in self._agents} - done

    def _gone(self, event: Left | Lost) -> None:
        agent = event.agent
        if agent not in self._agents:
            return
        working = agent in self._at_work()
        if isinstance(event, Lost):
            if working and agent not in self._leaving:
                self._faults.lost[agent] = event.why
            self._forget(agent)
            return
        needed = self.plan is not None and self._agents[agent] in self._chosen()
        if working:
            self._leaving.add(agent)  # until it says that nothing of the round is left there
        else:
            self._forget(agent)
        fixed = self.settings.min_hosts == self.settings.max_hosts
        if event.ends_job or (needed and (not self._chosen() or (fixed and self.missing))):
            self._dismissed = self._dismissed or event

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

    def _end(self, outcome: JobOutcome) -> None:
        self.outcome = replace(outcome, ranks=self._faults.ranks())
        self._faults = Faults()  # the outcome has them now
        self.phase = JobPhase.OVER

    def _defeat(self) -> JobOutcome:
        """Return the outcome of a job that failed for good."""
        assert self.plan is not None
        return self._faults.defeat(self.plan, self._limit())

    def _limit(self) -> str:
        """Say which limit of the user's lets the job fail."""
        most = self.settings.max_restarts
        return f"restarts: {self.restarts} of {most} used" if most else ""


def _why_alone(endpoint: str, line: str = "") -> str:
    """Explain that no other host can reach an endpoint, after `line`; empty if one may."""
    host = endpoint.rpartition(":")[0].strip("[]")
    if host not in ("localhost", "::1") and not host.startswith("127."):
        return ""
    return f"{line}; each host reaches only itself at {host}: name one that the others reach"


def assign_nodes(willing: Sequence[Joined], before: Sequence[str], most: int) -> list[Joined]:
    """Return the hosts that take part in a round, in the order of their nodes.

    - If every host has a node rank that its user fixed, they are in that order. Of two with the
      same one, a member of the last round precedes, then the one that came first; the other is a
      spare;
    - otherwise those of the last round keep their order, then follow the others as they came.

    Args:
        willing: The hosts at hand, in the order in which they came.
        before: The members of the last round, in the order of their nodes.
        most: How many there may be.
    """
    nodes = {agent: node for node, agent in enumerate(before)}
    fixed: dict[int, Joined] = {}
    for each in sorted(willing, key=lambda each: each.agent not in nodes):
        if each.node_rank is not None:
            fixed.setdefault(each.node_rank, each)
    if all(each.node_rank is not None for each in willing):
        return [fixed[rank] for rank in sorted(fixed)][:most]

    return sorted(willing, key=lambda each: nodes.get(each.agent, len(nodes)))[:most]
