"""When to end a round's ranks, and how hard: a state machine without any input or output.

The loop (`dure.launch.round`) reports what happened (*events*) and carries out what the supervisor
returns (*measures*). The supervisor knows only ranks, exit statuses and the time that it receives.

    RUNNING ──stop, a rank failed──▶ EXPLAINING ──▶ ENDING ──grace is over──▶ KILLING
       │                                              ▲                          ▲
       ├──all ranks succeeded──▶ LEAVING ─────────────┤ processes remain         │
       ├──stop, SIGTERM, SIGHUP───────────────────────┤                          │
       ├──stop, SIGTERM,... that ranks catch─▶ SAVING─┤                          │
       └──SIGINT──▶ INTERRUPTING ─────────────────────┘      a second request ───┘

A round's `Policy` says what ends it. On one host the first failure does (FAIL_FAST), and the
supervisor acts at once. On several hosts a failure is only noted (REPORT): the job's state decides
for all hosts, and `stop` carries the decision out. Ranks of an elastic job may be replaced (HOLD),
so neither failures nor successes end the round, only `stop`.

EXPLAINING asks the other ranks where they are, before anything makes them move, and lets a rank
that reported a crash exit. INTERRUPTING has passed SIGINT on to the ranks, as a terminal would.
SAVING has passed SIGTERM (or another signal of `JobSpec.signals`, such as SIGUSR1 before a batch
system's time limit) on to ranks that have a handler for it, and not to their children (a loader's
workers are needed for saving). ENDING has sent SIGTERM to every process of the job, KILLING sends
SIGKILL until none is left. Every state but RUNNING has a deadline, so the job ends whatever the
ranks do. The last state, DONE, is reached when all ranks have exited and no process of the job is
left.

**One request, many signals.** systemd, LSF and others signal every process of a service, and
systemd sends SIGHUP right after SIGTERM. So all signals within `request_s` of the first are one
request; a later one kills.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

from dure.launch.spec import Exit

__all__ = [
    "AskStacks",
    "Kill",
    "Measure",
    "Policy",
    "RoundPhase",
    "Signal",
    "Supervisor",
    "Sweep",
    "Timing",
    "leaves_no_time",
]

_LEAVE_NO_TIME = (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)


def leaves_no_time(number: int) -> bool:
    """Whether a signal means that the user pressed Ctrl-C, or is gone: no time for saving."""
    return number in _LEAVE_NO_TIME


class Policy(Enum):
    """Which ends of ranks end the round."""

    FAIL_FAST = "the first failure, or the success of all ranks"
    REPORT = "the success of all ranks; a failure is reported"
    HOLD = "none: ranks may be replaced until `stop`"


class RoundPhase(Enum):
    """Where a job is on its way to the end."""

    RUNNING = "ranks run, or ended well"
    EXPLAINING = "a rank failed; the others are asked where they are"
    INTERRUPTING = "SIGINT was passed on to the ranks"
    LEAVING = "all ranks succeeded; processes they started may still be leaving"
    SAVING = "the signal was passed on to the ranks, which catch it and may save"
    ENDING = "SIGTERM was sent to everything"
    KILLING = "SIGKILL is being sent to everything"
    DONE = "nothing is left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long the supervisor waits, in seconds.

    Attributes:
        stacks_s: For the other ranks' stacks.
        crash_s: For a rank that reported a crash to exit, when the round ends.
        held_crash_s: The same while the round continues; then the rank is killed.
        grace_s: From SIGTERM to SIGKILL, after a failure.
        interrupt_grace_s: The same after Ctrl-C or SIGTERM.
        saving_s: After SIGTERM, for ranks that catch it.
        request_s: Signals to the launcher within this time are one request.
        leave_s: For processes that outlive successful ranks to exit by themselves.
        sweep_s: Between two looks for remaining processes.
        give_up_s: For SIGKILL to work, which only a process stuck in the kernel resists.
        settle_s: For the other ranks to fail because of the first, and to write their flight
            records; and for a rank that hangs to write its own before it is killed.
    """

    stacks_s: float = 0.3
    crash_s: float = 0.6
    held_crash_s: float = 5.0
    grace_s: float = 5.0
    interrupt_grace_s: float = 0.6
    saving_s: float = 30.0
    request_s: float = 2.0
    leave_s: float = 0.2
    sweep_s: float = 0.02
    give_up_s: float = 5.0
    settle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AskStacks:
    """Ask these ranks for their Python stacks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signal:
    """Signal the ranks that still run, and with `everything` all other processes of the job."""

    number: int
    everything: bool


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill one rank, which has crashed and does not exit, or hangs."""

    rank: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """Count the processes of the job that are not ranks, and answer with `swept`."""


Measure = AskStacks | Signal | Kill | Sweep


class Supervisor:
    """The state of one round on one host. Each event method returns what to do now.

    Args:
        nproc: How many ranks were started.
        timing: How long to wait for what.
        policy: Which ends of ranks end the round.

    Attributes:
        policy: Which ends of ranks end the round.
        phase: Where the round is on its way to the end.
        first_failure: The rank that failed first while the round ran.
        interrupted_by: The first signal that asked the launcher to end.
        hung_ranks: Ranks that probably caused a hang.
        fenced: Whether everything was killed because other hosts may have given this one up.
        ended_by_launcher: Ranks that still ran when the round had to end.
        exits: How ranks ended, as far as they have.
    """

    def __init__(self, nproc: int, timing: Timing, policy: Policy = Policy.FAIL_FAST) -> None:
        self.phase = RoundPhase.RUNNING
        self.first_failure: int | None = None
        self.interrupted_by: int | None = None
        self.hung_ranks: set[int] = set()
        self.fenced = False
        self.ended_by_launcher: frozenset[int] = frozenset()
        self.exits: dict[int, Exit] = {}
        self._timing = timing
        self._nproc = nproc
        self.policy = policy
        self._deadline: float | None = None
        self._sweep_at: float | None = None
        self._one_request_until = 0.0
        self._silent: set[int] = set()  # asked for their stack, without an answer yet
        self._crashed: dict[int, float] = {}  # when a crash was reported
        self._hung_until: dict[int, float] = {}  # when a rank that hangs is killed

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks that have not exited, in order."""
        return tuple(rank for rank in range(self._nproc) if rank not in self.exits)

    @property
    def wake_at(self) -> float | None:
        """When `tick` must be called at the latest; None while only events matter."""
        times = [t for t in (self._deadline, self._sweep_at) if t is not None]
        return min((*times, *self._overdue().values()), default=None)

    def crashed(self, rank: int, now: float) -> list[Measure]:
        """An exception has left the program of `rank`, which is about to exit."""
        self._crashed[rank] = now
        return self._failed(rank, now)

    def hung(self, rank: int, now: float) -> list[Measure]:
        """All ranks have been idle for too long, and probably wait for `rank`."""
        if self.phase is not RoundPhase.RUNNING:
            return []
        self.hung_ranks.add(rank)
        if self.policy is Policy.HOLD:  # the others may continue without it
            if self._timing.settle_s == 0:
                return [Kill(rank)]
            self._hung_until.setdefault(rank, now + self._timing.settle_s)
            return []
        self.first_failure = None
        return self._failed(rank, now)

    def exited(self, rank: int, status: Exit, now: float) -> list[Measure]:
        """A rank has ended."""
        self.exits[rank] = status
        self._silent.discard(rank)
        if self.phase is RoundPhase.RUNNING:
            if not self.succeeded(rank):
                return self._failed(rank, now)
            if self._all_succeeded and self.policy is not Policy.HOLD:
                return self._leave(now)
            return []
        if self.phase is RoundPhase.EXPLAINING:
            return self._end_if_explained(now)
        if self.alive:
            return []
        self._sweep_at = None
        return [Sweep()]

    def succeeded(self, rank: int) -> bool:
        """Return whether `rank` has ended, and well."""
        return rank in self.exits and self.exits[rank].ok and rank not in self._crashed

    @property
    def spares_detached(self) -> bool:
        """Whether all has gone well, so that what ranks have detached from themselves may stay."""
        return self._all_succeeded and self.interrupted_by is None and not self.fenced

    def replaced(self, rank: int) -> None:
        """Another process was started in place of one that has ended."""
        self.exits.pop(rank, None)
        self._crashed.pop(rank, None)
        self._hung_until.pop(rank, None)
        self.hung_ranks.discard(rank)

    def stop(self, now: float, *, explain: bool = False, saving: bool = False) -> list[Measure]:
        """End the round: a rank has failed, here or elsewhere, or hosts come or go.

        `explain`: ask the ranks first where they are. `saving`: they have handlers for SIGTERM, and
        time to save.
        """
        if self.phase is not RoundPhase.RUNNING:
            return []
        if not self.alive:
            failed = explain and self.policy is not Policy.HOLD
            return self._end(now, self._grace) if failed else self._leave(now)
        if saving:
            return self._save(now, signal.SIGTERM)
        if explain:
            self.phase = RoundPhase.EXPLAINING
            self._silent = set(self.alive) - self._crashed.keys()
            leaving = self._crashed.keys() & set(self.alive)
            explain_s = self._timing.crash_s if leaving else self._timing.stacks_s
            self._deadline = now + max(explain_s, self._timing.settle_s)
            asking: list[Measure] = [AskStacks(tuple(self._silent))] if self._silent else []
            return asking + self._end_if_explained(now)
        return self._end(now, self._grace)

    def fence(self, now: float) -> list[Measure]:
        """Kill everything at once: this host may have been given up by the others."""
        self.fenced = True
        return [] if self.phase in (RoundPhase.KILLING, RoundPhase.DONE) else self._kill(now)

    def explained(self, rank: int, now: float) -> list[Measure]:
        """A rank has answered with its stack."""
        self._silent.discard(rank)
        return self._end_if_explained(now) if self.phase is RoundPhase.EXPLAINING else []

    def interrupted(self, number: int, now: float, *, caught: bool = False) -> list[Measure]:
        """The launcher was sent a signal: the first request is polite, the second kills.

        `caught`: a rank has a handler for it.
        """
        if self.phase is RoundPhase.DONE:
            return []
        if self.interrupted_by is not None:
            return self._kill(now) if now >= self._one_request_until else []
        self.interrupted_by = number
        self._one_request_until = now + self._timing.request_s
        self._mark_survivors()
        if not leaves_no_time(number) and caught and self.alive:
            return self._save(now, number)
        if number != signal.SIGINT or not self.alive:
            return self._end(now, self._timing.interrupt_grace_s)
        self.phase = RoundPhase.INTERRUPTING
        self._deadline = now + self._timing.interrupt_grace_s / 2
        return [AskStacks(self.alive), Signal(signal.SIGINT, everything=False)]

    def swept(self, others: int, now: float) -> list[Measure]:
        """So many processes that are not ranks are left."""
        if self.alive or self.phase is RoundPhase.RUNNING:
            return []
        if others == 0:
            self.phase = RoundPhase.DONE
            self._deadline = self._sweep_at = None
            return []
        self._sweep_at = now + self._timing.sweep_s
        if self.phase in (RoundPhase.EXPLAINING, RoundPhase.INTERRUPTING, RoundPhase.SAVING):
            return self._end(now, self._grace)
        return []

    def tick(self, now: float) -> list[Measure]:
        """Do what the time demands."""
        if self._deadline is not None and now >= self._deadline:
            return self._deadline_passed(now)
        if self._sweep_at is not None and now >= self._sweep_at:
            self._sweep_at = None
            again: list[Measure] = [Sweep()]
            if self.phase is RoundPhase.KILLING:
                self._sweep_at = now + self._timing.sweep_s
                again.insert(0, Signal(signal.SIGKILL, everything=True))
            return again
        overdue = [rank for rank, at in self._overdue().items() if now >= at]
        for rank in overdue:
            if self._hung_until.pop(rank, None) is None:
                self._crashed[rank] = now
        return [Kill(rank) for rank in overdue]

    def _overdue(self) -> dict[int, float]:
        """Return when to kill each rank that has crashed or hangs, while others work."""
        if self.phase is not RoundPhase.RUNNING or self.policy is not Policy.HOLD:
            return {}
        held_s = self._timing.held_crash_s
        times = {r: at + held_s for r, at in self._crashed.items()} | self._hung_until
        return {rank: at for rank, at in times.items() if rank not in self.exits}

    @property
    def _grace(self) -> float:
        timing = self._timing
        return timing.grace_s if self.interrupted_by is None else timing.interrupt_grace_s

    def _deadline_passed(self, now: float) -> list[Measure]:
        if self.phase in (RoundPhase.EXPLAINING, RoundPhase.LEAVING):
            return self._end(now, self._grace)
        if self.phase is RoundPhase.INTERRUPTING:
            return self._end(now, self._grace / 2)
        if self.phase in (RoundPhase.SAVING, RoundPhase.ENDING):
            return self._kill(now)
        self.phase = RoundPhase.DONE  # SIGKILL did not help: nothing else would
        self._deadline = self._sweep_at = None
        return []

    def _failed(self, rank: int, now: float) -> list[Measure]:
        """Note the first failure; end the round if one is enough."""
        if self.phase is not RoundPhase.RUNNING:
            return []
        if self.first_failure is None:
            self.first_failure = rank
        return self.stop(now, explain=True) if self.policy is Policy.FAIL_FAST else []

    @property
    def _all_succeeded(self) -> bool:
        return all(self.succeeded(rank) for rank in range(self._nproc))

    def _end_if_explained(self, now: float) -> list[Measure]:
        """Go on to ENDING once every answer is in and the crashed ranks have gone."""
        if self._silent or self._crashed.keys() & set(self.alive):
            return []
        if self.alive and self._timing.settle_s:
            return []
        self._mark_survivors()
        return self._end(now, self._grace)

    def _save(self, now: float, number: int) -> list[Measure]:
        self._mark_survivors()
        self.phase = RoundPhase.SAVING
        self._deadline = now + self._timing.saving_s
        return [Signal(number, everything=False)]

    def _leave(self, now: float) -> list[Measure]:
        self.phase = RoundPhase.LEAVING
        self._deadline = now + self._timing.leave_s
        return [Sweep()]

    def _end(self, now: float, grace_s: float) -> list[Measure]:
        self._mark_survivors()
        self.phase = RoundPhase.ENDING
        self._deadline = now + grace_s
        asked: list[Measure] = [Signal(signal.SIGTERM, everything=True)]
        return asked if self.alive else [*asked, Sweep()]

    def _kill(self, now: float) -> list[Measure]:
        self._mark_survivors()
        self.phase = RoundPhase.KILLING
        self._deadline = now + self._timing.give_up_s
        self._sweep_at = now + self._timing.sweep_s
        return [Signal(signal.SIGKILL, everything=True)]

    def _mark_survivors(self) -> None:
        """Remember whom the launcher ends, for their exit status is then not their own."""
        self.ended_by_launcher = self.ended_by_launcher.union(self.alive)
