"""The agent: one host's part in a job on several hosts, from its joining to its exit code.

An agent learns its action from the job's state (`membership`), does it, and reports the result. It
knows no more of the job than that:

    action    does                                          reports
    ------    ----                                          -------
    Idle      nothing, until there is news                  Expired, if a timer runs out
    RunRound  starts its ranks and watches them             Failed, Finished, Ended
    Stop      ends its ranks, and all that they started     Ended
    Rejoin    ends its ranks, joins under another name      Joined
    Leave     returns the job's result                      Left

While ranks run, their loop calls the agent after each event (`_attend`), which looks up its current
action. The state alone decides what follows from a rank's failure; the agent reports it, and
carries out its action.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from dataclasses import replace

from dure.launch.agent.events import (
    Action,
    Ended,
    Event,
    Expired,
    Failed,
    Finished,
    Idle,
    JobOutcome,
    Leave,
    Left,
    Rejoin,
    RunRound,
    Stop,
)
from dure.launch.agent.link import Link
from dure.launch.agent.membership import HostMember, boottime
from dure.launch.backoff import SHORT_ROUND_S
from dure.launch.ranks.ports import reserve_port
from dure.launch.round import RoundRun, Workplace
from dure.launch.signals import Interrupted, first_of
from dure.launch.spec import RankResult
from dure.launch.supervisor import Measure, Policy, RoundPhase

__all__ = ["Agent"]

_AGAIN_S = 1.0
"""Before a timer that has run out starts again."""


class Agent:
    """One host's part in a job.

    Args:
        place: This host.
        link: The way to the other agents.

    Attributes:
        interrupted_by: The signal that asked this launcher to end, if one did.
        outlived: Processes that ranks left behind and the launcher ended, by number.
        ranks: The results of this host's ranks in the last round.
        node: This host's number in that.
    """

    def __init__(self, place: Workplace, link: Link) -> None:
        self.interrupted_by: int | None = None
        self.outlived: dict[int, str] = {}
        self.ranks: tuple[RankResult, ...] = ()
        self.node = 0
        self._place, self._link = place, link
        self._member: HostMember | None = None
        self._held = place.spec.elastic or place.spec.keep_going
        self._run: RoundRun | None = None
        self._reported: set[str] = set()  # events that the job's state has or will get
        self._shown: set[str] = set()  # lines that are shown once
        self._replaced: dict[int, int] = {}
        self._timer, self._since = "", 0.0  # the timer that runs, and since when
        self._port = 0  # kept for rank 0, if that is here
        self._began = 0.0  # when the present round did, by the monotonic clock

    def work(self) -> JobOutcome:
        """Take part in the job until it is over, for this host at least."""
        keeper, port = reserve_port()
        self._port = self._place.spec.master_port or port
        try:
            self._join()
            while True:
                action = self._action()
                if isinstance(action, Leave):
                    if not self._began and action.outcome.code == 0:
                        self._say("the job has ended; this host had no part in it")
                    return action.outcome
                if self.interrupted_by is not None and isinstance(action, Rejoin):
                    return JobOutcome(code=128 + self.interrupted_by, ranks=self.ranks)
                self._do(action)
        except Interrupted as error:
            self.interrupted_by = self.interrupted_by or error.number
            return JobOutcome(code=128 + self.interrupted_by, ranks=self.ranks)
        except BaseException as error:
            if self._member is not None and not self._member.gone:
                coordinates = self._link.endpoint.coordinates
                why = f"{self._place.host} cannot continue: {error}"
                self._me.report(Left(self._me.agent, 1, why, ends_job=coordinates))
            raise
        finally:
            keeper.close()

    @property
    def _me(self) -> HostMember:
        """This agent's membership."""
        assert self._member is not None
        return self._member

    # --- while ranks run ---------------------------------------------------------------------

    def _look_at(self) -> float:
        """Return when to look again at the latest."""
        return time.monotonic() + max(0.0, self._me.expires_at - boottime())

    def _attend(self, now: float) -> list[Measure]:
        """Report what has happened to the ranks, and find out whether they may continue."""
        run = self._run
        assert run is not None
        self._report(run)
        if self._me.gone:
            return run.supervisor.fence(now)
        action = self._action()
        if isinstance(action, RunRound) and action.round.number == run.round.number:
            self._replace(run, action)
            return []
        if run.supervisor.phase is not RoundPhase.RUNNING:
            return []
        if not isinstance(action, Stop):
            return run.supervisor.stop(now)
        saving = action.departing and run.catches(signal.SIGTERM)
        return run.supervisor.stop(now, explain=action.failed, saving=saving)

    # --- actions --------------------------------------------------------------------------------

    def _join(self) -> None:
        self._reported.clear()
        self._member = None
        self._member = self._link.join(self._place.host, self._port)
        settings = self._member.settings
        self._place = replace(self._place, spec=replace(self._place.spec, run_id=settings.run_id))
        os.pwrite(self._place.address.key_fd, settings.job_key, 0)

    def _action(self) -> Action:
        """Return what the state wants; show its news of other hosts."""
        action = self._me.action()
        if self._me.gone:
            return Rejoin()
        for name, line in action.notes if isinstance(action, RunRound) else ():
            self._say_once(name, line)
        return action

    def _do(self, action: Action) -> None:
        match action:
            case Idle():
                self._wait(action)
            case RunRound() if f"ended {action.round.number}" in self._reported:
                self._sleep()  # the state does not know that yet
            case RunRound():
                self._run_round(action)
            case Stop():
                ended = Ended(self._me.agent, action.round)
                self._report_once(f"ended {action.round}", ended)
            case Rejoin():
                why = self._me.gone or "the others have given this host up"
                self._say(f"{why}; its ranks were ended, and it looks for the job again")
                self._join()
            case Leave():
                pass  # `work` returns

    def _run_round(self, action: RunRound) -> None:
        number, layout = action.round.number, action.round
        self.node = layout.node
        if number > 0:
            self._place.terminal.note(
                "restart",
                number=number,
                restarts=action.restarts,
                why=action.setback,
                delay_s=action.delay_s,
            )
            more = layout.num_hosts - len(layout.hosts)
            hosts = ", ".join(layout.hosts) + (f" and {more} more" if more > 0 else "")
            ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''}"
            self._say(
                f"{action.setback}; round {number} starts with {ranks} on {hosts} (restarts: "
                f"{action.restarts} of {self._me.settings.max_restarts})"
            )
        self._replaced = {due.local_rank: due.times for due in action.replaced}
        policy = Policy.HOLD if self._held else Policy.REPORT
        run = self._run = RoundRun(self._place, layout, policy)
        self._began = time.monotonic()
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
        """Report how a round ended here, when nothing of it is left."""
        number, supervisor = run.round.number, run.supervisor
        self._report(run)
        well = all(map(supervisor.succeeded, range(run.round.nproc)))
        if well:
            run.warn_of_no_elastic("without it a job needs no --elastic")
        if not self._me.gone:
            well = well and not self._held and supervisor.interrupted_by is None
            self._report_once(f"ended {number}", Ended(self._me.agent, number, self.ranks, well))

    def _report(self, run: RoundRun) -> None:
        """Report what is new of the ranks and of signals."""
        supervisor, number = run.supervisor, run.round.number
        if supervisor.first_failure is not None and not self._held:
            local = supervisor.first_failure
            early = time.monotonic() - self._began < SHORT_ROUND_S
            failed = Failed(self._me.agent, number, local, run.result(local), early=early)
            self._report_once(f"failed {number}", failed, wait=False)
        if self._held and supervisor.phase is RoundPhase.RUNNING:
            self._report_ends(run)
        if supervisor.interrupted_by is not None and self.interrupted_by is None:
            self._leave(supervisor.interrupted_by)

    def _report_ends(self, run: RoundRun) -> None:
        """Report which ranks of an elastic job have ended."""
        number = run.round.number
        for local in run.supervisor.exits:
            times = self._replaced.get(local, 0)
            if run.supervisor.succeeded(local):
                event: Event = Finished(self._me.agent, number, local)
            else:
                event = Failed(self._me.agent, number, local, run.result(local), times)
            self._report_once(f"end {local} {times}", event, wait=False)

    def _replace(self, run: RoundRun, action: RunRound) -> None:
        """Start the replacements that are due for ranks that have ended."""
        for due in action.replaced:
            local = due.local_rank
            if due.times > self._replaced.get(local, 0) and local in run.supervisor.exits:
                self._replaced[local] = due.times
                run.replace(local, due.times, due.restart)

    def _leave(self, number: int) -> None:
        self.interrupted_by = number
        why, coordinates = f"asked to end on {self._place.host}", self._link.endpoint.coordinates
        if coordinates:
            why += ", which coordinates the job"
        self._me.report(Left(self._me.agent, 128 + number, why, ends_job=coordinates))

    # --- waiting -------------------------------------------------------------------------------

    def _report_once(self, what: str, event: Event, *, wait: bool = True) -> None:
        """Report an event; with `wait`, if that was done already, wait for what follows from it."""
        if what not in self._reported:
            self._reported.add(what)
            self._me.report(event)
        elif wait:
            self._sleep()

    def _wait(self, action: Idle) -> None:
        """Wait for news, or until the action's timer runs out; show its line if that takes long."""
        now = time.monotonic()
        if action.timer != self._timer or not action.timer:
            self._timer, self._since = action.timer, now
        due = self._since + action.after_s if action.timer else math.inf
        shows_at = self._since + action.quiet_s
        if action.line and now >= shows_at:
            self._say_once(action.line, action.line)
        if now < due:
            self._sleep(min(due, shows_at) if action.line and now < shows_at else due)
            return
        # It changes nothing if a host came in the meantime; should that one be lost, the same time
        # runs once more.
        self._me.report(Expired(action.timer))
        self._sleep(now + _AGAIN_S)
        self._since = time.monotonic()

    def _say(self, line: str) -> None:
        self._place.terminal.say(line)

    def _say_once(self, what: str, line: str) -> None:
        if what not in self._shown:
            self._shown.add(what)
            self._say(line)

    def _sleep(self, until: float = math.inf) -> None:
        """Wait for news, a signal or a time."""
        left_s = min(self._me.expires_at - boottime(), until - time.monotonic())
        select.select([self._me.fd, self._place.signals], [], [], max(0.0, left_s))
        number = first_of(self._place.spec.signals, self._place.signals)
        if number is not None and self.interrupted_by is not None:
            raise Interrupted(number)
        if number is not None:
            self._leave(number)
