"""The agent: one host's part in a job, from its joining to its exit code.

An agent asks the job's state for its action, does it, and tells the others what came of it. It
knows no more of the job than that:

    action    does                                          tells
    ------    ----                                          -----
    Wait      nothing, until there is news                  Expired, if a timer runs out
    Prepare   keeps a port for rank 0                       Ready
    Work      starts its ranks and watches them             Failed, Finished, Ended
    Stop      ends its ranks, and all that they started     Ended
    Rejoin    ends its ranks, joins under another name      Joined
    Leave     returns the job's result                      Left

While ranks run, the agent is asked by their loop (`_attend`): it looks at its action after
everything that happens, which costs nothing on a single host and one look at a pipe on several.
What a rank's failure means is decided in the state alone; the agent tells of it, and then does its
action.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from dataclasses import replace

from dure.errors import LaunchError
from dure.launch.agent.events import (
    Action,
    Ended,
    Event,
    Expired,
    Failed,
    Finished,
    Leave,
    Left,
    Outcome,
    Plan,
    Prepare,
    Ready,
    Rejoin,
    Stop,
    Timer,
    Wait,
    Work,
)
from dure.launch.agent.link import Link, OnlyMember
from dure.launch.agent.machine import Machine
from dure.launch.agent.machine import Phase as MachinePhase
from dure.launch.agent.membership import Member, boottime
from dure.launch.ranks.environment import Round
from dure.launch.ranks.ports import reserve_port
from dure.launch.round import RoundRun, Workplace
from dure.launch.signals import read_signals
from dure.launch.spec import RankResult
from dure.launch.supervisor import Measure, Phase, Policy

__all__ = ["Agent"]

_CRASH_S = 5.0
"""How long a rank of an elastic job that has crashed may take to exit, before it is killed."""

_QUIET_S = 3.0
"""How long an agent waits for other hosts before it says so."""

_AGAIN_S = 1.0
"""Before a time that has run out is told of again, at least."""


class Agent:
    """One host's part in a job.

    Args:
        place: This host.
        link: The way to the other agents.
    """

    def __init__(self, place: Workplace, link: Link) -> None:
        self.interrupted_by: int | None = None
        self.outlived: dict[int, str] = {}
        self.ranks: tuple[RankResult, ...] = ()  # of this host, in the last round
        self.node = 0
        self._place, self._link = place, link
        self._joined: Member | OnlyMember | None = None
        self._held = place.spec.elastic or place.spec.keep_going
        self._run: RoundRun | None = None
        self._told: set[str] = set()  # what need not be told again
        self._spoken: set[str] = set()  # what the user need not hear again
        self._replaced: dict[int, int] = {}
        self._crashed_at: dict[int, float] = {}
        self._timers: dict[str, float] = {}
        self._keeper: socket.socket | None = None

    def work(self) -> Outcome:
        """Take part in the job until it is over, for this host at least."""
        try:
            self._join()
            while True:
                action = self._action()
                if isinstance(action, Leave) and not self._must_stay():
                    return action.outcome
                if self.interrupted_by is not None and isinstance(action, Rejoin):
                    return Outcome(code=128 + self.interrupted_by, ranks=self.ranks)
                self._do(action)
        except BaseException as error:
            if self._joined is not None and not self._joined.gone:
                why = f"{self._place.host} cannot go on: {error}"
                self._me.tell(Left(self._me.agent, 1, why, ends_job=self._link.coordinates))
            raise
        finally:
            self._release_port()

    def _must_stay(self) -> bool:
        """Whether others depend on this host, which has no part in the job any more."""
        return self._link.coordinates and self._state.phase is not MachinePhase.OVER

    @property
    def _me(self) -> Member | OnlyMember:
        """This agent's membership."""
        assert self._joined is not None
        return self._joined

    @property
    def _state(self) -> Machine:
        """The job's state, as it was seen last."""
        return self._me.machine()

    # --- while ranks run ---------------------------------------------------------------------

    def _look_at(self) -> float | None:
        """Return when to look again at the latest."""
        times = [at + _CRASH_S for at in self._crashed_at.values()]
        if self._me.expires_at is not None:
            times.append(time.monotonic() + max(0.0, self._me.expires_at - boottime()))
        return min(times, default=None)

    def _attend(self, now: float) -> list[Measure]:
        """Tell what has become of the ranks, and find out whether they may go on."""
        run = self._run
        assert run is not None
        self._report(run, now)
        if self._me.gone:
            return run.supervisor.fence(now)
        action = self._action()
        if isinstance(action, Work) and action.plan.number == run.round.number:
            self._replace(run, action)
            return []
        if run.supervisor.phase is not Phase.RUNNING:
            return []
        state = self._state
        saving = state.departing and run.catches(signal.SIGTERM)
        return run.supervisor.stop(now, explain=state.failed, saving=saving)

    # --- actions --------------------------------------------------------------------------------

    def _join(self) -> None:
        self._told.clear()
        self._timers.clear()
        self._joined = None
        self._joined = self._link.join(self._place.host)
        settings = self._state.settings
        self._place = replace(self._place, spec=replace(self._place.spec, run_id=settings.run_id))
        os.pwrite(self._place.address.key_fd, settings.job_key, 0)

    def _action(self) -> Action:
        """Return what the state wants; show what it notes of other hosts."""
        state = self._state
        for note in state.notes:
            self._say_once(note, note)
        return Rejoin() if self._me.gone else state.action(self._me.agent)

    def _do(self, action: Action) -> None:
        match action:
            case Wait():
                self._wait(action.timer)
            case Prepare():
                self._prepare(action.plan)
            case Work() if f"ended {action.plan.number}" in self._told:
                self._sleep(None)  # our own word has not come back yet
            case Work():
                self._run_round(action)
            case Stop():
                self._tell_once(
                    f"ended {action.plan.number}", Ended(self._me.agent, action.plan.number)
                )
            case Rejoin():
                why = self._me.gone or "the others have given this host up"
                self._say(f"{why}; its ranks were ended, and it looks for the job again")
                self._join()
            case Leave():  # but others depend on this host
                why = action.outcome.why
                self._say_once("stays", f"{why}; it goes on coordinating, without ranks")
                self._sleep(None)

    def _prepare(self, plan: Plan) -> None:
        self._release_port()
        port = self._place.spec.master_port
        if port is None:
            self._keeper, port = reserve_port()
        address = self._place.spec.master_addr or self._me.address
        ready = Ready(self._me.agent, plan.number, address, port)
        self._tell_once(f"ready {plan.number}", ready)

    def _run_round(self, action: Work) -> None:
        plan = action.plan
        round = Round.of(
            number=plan.number,
            node=plan.node_of(self._me.agent),
            hosts=plan.hosts,
            nprocs=plan.nprocs,
            master_addr=action.ready.master_addr,
            master_port=action.ready.master_port,
            store=self._state.settings.store,
        )
        self.node = round.node
        if plan.number > 0:
            state = self._state
            self._say(
                f"{state.setback}; round {plan.number} starts with {round.world_size} ranks on "
                f"{', '.join(plan.hosts)} (restarts: {state.restarts} of "
                f"{state.settings.max_restarts})"
            )
        self._replaced, self._crashed_at = dict(action.replaced), {}
        policy = Policy.HOLD if self._held else Policy.REPORT
        run = self._run = RoundRun(self._place, round, policy)
        try:
            run.start()
            run.run(self._attend, self._me.fd, self._look_at)
            self.ranks = run.results()
            self.outlived |= run.outlived
            self._conclude(run)
        finally:
            self._run = None
            run.close()

    def _conclude(self, run: RoundRun) -> None:
        """Tell how a round ended here, of which nothing is left."""
        number, supervisor = run.round.number, run.supervisor
        self._report(run, time.monotonic())
        well = all(map(supervisor.succeeded, range(run.round.nproc)))
        if well:
            self._warn_of_no_elastic(run, "without it a job needs no --elastic")
        if not self._me.gone:
            well = well and not self._held and supervisor.interrupted_by is None
            self._tell_once(f"ended {number}", Ended(self._me.agent, number, self.ranks, well))

    def _report(self, run: RoundRun, now: float) -> None:
        """Tell what is new of the ranks and of signals."""
        supervisor, number = run.supervisor, run.round.number
        if supervisor.first_failure is not None and not self._held:
            local = supervisor.first_failure
            failed = Failed(self._me.agent, number, local, run.result(local))
            self._tell_once(f"failed {number}", failed, wait=False)
        if self._held and supervisor.phase is Phase.RUNNING:
            self._report_ends(run, now)
        if supervisor.interrupted_by is not None and self.interrupted_by is None:
            self._leave(supervisor.interrupted_by)

    def _report_ends(self, run: RoundRun, now: float) -> None:
        """Tell which ranks of an elastic job have ended; kill one that crashed and does not."""
        supervisor, number = run.supervisor, run.round.number
        for local in range(run.round.nproc):
            if local in supervisor.exits:
                self._crashed_at.pop(local, None)
                again = f"end {local} {self._replaced.get(local, 0)}"
                if supervisor.succeeded(local):
                    event: Event = Finished(self._me.agent, number, local)
                else:
                    times = self._replaced.get(local, 0)
                    event = Failed(self._me.agent, number, local, run.result(local), times)
                self._tell_once(again, event, wait=False)
            elif supervisor.has_crashed(local) and local not in self._crashed_at:
                self._crashed_at[local] = now
        for local, at in self._crashed_at.items():
            if now > at + _CRASH_S:
                run.ranks[local].signal(signal.SIGKILL)
                self._crashed_at[local] = now

    def _replace(self, run: RoundRun, action: Work) -> None:
        """Start what the machine wants started in place of ranks that have ended."""
        due = [(k, n) for k, n in action.replaced if n > self._replaced.get(k, 0)]
        first = self._state.restarts - len(due) + 1
        for number, (local, times) in enumerate(due, first):
            if local in run.supervisor.exits:
                self._replaced[local] = times
                self._say(
                    f"rank {run.round.rank(local)} has ended ({run.supervisor.exits[local]}); "
                    f"replacement {number} of {self._place.spec.max_restarts} is started"
                )
                self._warn_of_no_elastic(run, "until then nobody recovers from a death")
                run.replace(local, times)

    def _warn_of_no_elastic(self, run: RoundRun, why: str) -> None:
        """Say once that a program which was started with --elastic does not recover by itself."""
        spec = self._place.spec
        if spec.elastic and spec.kind != "executable" and not run.elastic:
            self._say_once("elastic", f"--elastic: no rank has called dure.elastic.run; {why}")

    def _leave(self, number: int) -> None:
        self.interrupted_by = number
        why = f"told to end on {self._place.host}"
        if self._link.coordinates:
            why += ", which coordinates the job"
        self._me.tell(Left(self._me.agent, 128 + number, why, ends_job=self._link.coordinates))

    # --- waiting -------------------------------------------------------------------------------

    def _tell_once(self, what: str, event: Event, *, wait: bool = True) -> None:
        """Tell an event, and with `wait`, if that was done already, wait for what it brings."""
        if what not in self._told:
            self._told.add(what)
            self._me.tell(event)
        elif wait:
            self._sleep(None)

    def _wait(self, timer: Timer | None) -> None:
        if timer is None:
            self._sleep(None)
            return
        now = time.monotonic()
        due = self._timers.setdefault(timer.name, now + timer.after_s)
        if now < due:
            speaks_at = due - timer.after_s + _QUIET_S
            if now >= speaks_at:
                self._say_who_is_missing(timer)
            self._sleep(min(due, speaks_at) if now < speaks_at else due)
            return
        # Told in vain if somebody came meanwhile; should he be lost, the same time runs once more.
        self._timers[timer.name] = now + max(timer.after_s, _AGAIN_S)
        self._me.tell(Expired(timer.name))

    def _say_who_is_missing(self, timer: Timer) -> None:
        if missing := self._state.missing:
            self._say_once(
                timer.name,
                f"waiting at {self._place.spec.endpoint} for {missing} more "
                f"host{'s' if missing > 1 else ''} (until {timer.after_s:g} s have passed)",
            )

    def _say(self, line: str) -> None:
        self._place.terminal.say(line)

    def _say_once(self, what: str, line: str) -> None:
        if what not in self._spoken:
            self._spoken.add(what)
            self._say(line)

    def _sleep(self, until: float | None) -> None:
        """Wait for news, a signal or a time."""
        fds = [fd for fd in (self._me.fd, self._place.signals) if fd >= 0]
        timeout = None if until is None else max(0.0, until - time.monotonic())
        if self._me.expires_at is not None:
            left_s = max(0.0, self._me.expires_at - boottime())
            timeout = left_s if timeout is None else min(timeout, left_s)
        select.select(fds, [], [], timeout)
        for number in read_signals(self._place.signals):
            if number not in self._place.spec.signals:
                continue  # meant for ranks
            if self.interrupted_by is None:
                self._leave(number)
            else:
                raise LaunchError("interrupted while waiting for the other hosts")

    def _release_port(self) -> None:
        if self._keeper is not None:
            with contextlib.suppress(OSError):
                self._keeper.close()
            self._keeper = None
