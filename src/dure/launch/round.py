"""One round on one host: its ranks are started, and watched until none is left.

One thread, one selector. It waits for any of: output and reports of the ranks (pipes), their ends
(pidfds), signals to the launcher (a pipe), a terminal that can take more, news of other hosts, and
the next deadline. Each event is reported to the supervisor (`dure.launch.supervisor`), and the
measures that it returns are carried out. A round ends when its ranks do, when one fails, or when
its caller says so: the job on one host (`dure.launch.local`) or the agent (`dure.launch.agent`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from dure import env
from dure.launch.hang import HangDetector, likely_cause
from dure.launch.ranks.cores import threads_for
from dure.launch.ranks.environment import JobAddress, Round, rank_log_dir, rank_variables
from dure.launch.ranks.errorfiles import error_file, known_crash
from dure.launch.ranks.processes import JobProcesses, now, reap_orphans, start_times
from dure.launch.ranks.reaper import Reaper
from dure.launch.ranks.report import ReportReader
from dure.launch.ranks.spawn import RankProcess, start_rank
from dure.launch.ranks.zygote import Zygote
from dure.launch.show.output import LineReader, Sink
from dure.launch.show.terminal import Terminal
from dure.launch.signals import read_signals
from dure.launch.spec import HANG, Crash, Exit, JobSpec, RankResult, Stream
from dure.launch.supervisor import (
    AskStacks,
    Kill,
    Measure,
    Policy,
    RoundPhase,
    Signal,
    Supervisor,
    Timing,
    leaves_no_time,
)

if TYPE_CHECKING:
    from dure.launch.health import HealthServer

__all__ = ["RoundRun", "Workplace"]

_CHUNK = 1 << 16
_SESSION_S = 1.0  # for processes that a replaced rank has left running to die

_REAP_S = 5.0  # between two looks for orphans that have died

_SETTLE_S = 1.0
"""For a rank to notice that a peer has gone, over any engine, and to write its flight record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """What all rounds of a job share on this host.

    Args:
        spec: The job.
        address: The job's identity, which its processes inherit.
        host: This host's name.
        terminal: Where output goes.
        signals: The pipe in which signals to the launcher arrive.
        zygote: The process that ranks are forked from, if there is one.
        reaper: The process that ends the ranks if the launcher cannot, if there is one.
        since: When the job began (`ranks.processes.now`).
        health: The server of probes, if there is one.
    """

    spec: JobSpec
    address: JobAddress
    host: str
    terminal: Terminal
    signals: int
    zygote: Zygote | None
    reaper: Reaper | None = None
    since: int = field(default_factory=now)
    health: HealthServer | None = None


class RoundRun:
    """A round that runs here; call `close` in the end, also after an error.

    Args:
        place: Shared with other rounds.
        layout: Which hosts and ranks take part.
        policy: Which ends of ranks end it.
    """

    def __init__(self, place: Workplace, layout: Round, policy: Policy) -> None:
        self.round = layout
        self.supervisor = Supervisor(layout.nproc, _timing(place.spec), policy)
        self.ranks: list[RankProcess] = []
        self.reports: list[ReportReader] = []
        self.outlived: dict[int, str] = {}
        self._elastic = False  # a rank has entered `dure.elastic.run`, or the user knows of none
        self._place = place
        self._terminal = place.terminal
        self._numbers: dict[int, int] = {}  # of ranks that were replaced, by local rank
        self._threads = threads_for(place.spec)
        self._retired: list[RankProcess] = []  # replaced by others
        self._processes = self._all_processes()
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[int, Callable[[bytes], None]] = {}  # descriptor to who takes its bytes
        self._watched_sinks: set[int] = set()
        self._reading = True
        self._reap_at = time.monotonic() + _REAP_S
        hang_s = place.spec.hang_timeout_s
        self.hang: HangDetector | None = None
        if hang_s is not None:
            alone = place.spec.nnodes[1] == 1
            self.hang = HangDetector(hang_s, time.monotonic(), alone=alone)
        if place.health is not None:
            place.health.running, place.health.hang = True, self.hang
        self._selector.register(place.signals, selectors.EVENT_READ, self._signalled)

    # --- its life ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start all ranks.

        Raises:
            OSError: One cannot be started; `close` ends the others.
        """
        spec, zygote = self._place.spec, self._place.zygote
        self._terminal.begin(self.round)
        for local_rank in range(self.round.nproc):
            self.ranks.append(self._started(local_rank, self.round))
            self.reports.append(ReportReader())
            self._watch(local_rank)
        self._processes = self._all_processes()
        may_restart = spec.max_restarts > 0 or spec.elastic or spec.nnodes[0] != spec.nnodes[1]
        if zygote is not None and not may_restart:
            zygote.close()

    def replace(self, local_rank: int, times: int, restart: int) -> None:
        """Start a rank again that has ended, for the `times`-th time; `restart` counts them all."""
        self._terminal.say(
            f"rank {self.round.rank(local_rank)} has ended ({self.supervisor.exits[local_rank]}); "
            f"replacement {restart} of {self._place.spec.max_restarts} is started"
        )
        self.warn_of_no_elastic("until then no rank recovers from a death")
        again = replace(self.round, number=times)
        if self._place.spec.log_dir is not None:
            directory = rank_log_dir(self._place.spec.log_dir, again.rank(local_rank), times)
            with contextlib.suppress(OSError):  # a full disk must not end the job
                directory.mkdir(parents=True, exist_ok=True)  # for its error file
        self._numbers[local_rank] = times
        process = self._started(local_rank, again)
        old = self.ranks[local_rank]
        session = f"none but those of {old.pid}"
        JobProcesses(start_times((old.pid,)), session, below=os.getpid()).kill_all(_SESSION_S)
        self._retired.append(old)  # a zombie that keeps its session's number
        for fd in (old.stdout.fileno(), old.stderr.fileno(), old.report_fd):
            self._drain(fd)
            self._forget(fd)
        old.close()  # a job may replace thousands
        self.ranks[local_rank] = process
        self.reports[local_rank] = ReportReader()
        self._watch(local_rank)
        self._processes = self._all_processes()
        self.supervisor.replaced(local_rank)

    def run(
        self,
        attend: Callable[[float], list[Measure]] | None = None,
        news: int = -1,
        look_at: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Return when no process of the round is left.

        Args:
            attend: Called after each event; returns what to do about it.
            news: A descriptor that becomes readable when `attend` is to be called; -1: none.
            look_at: Returns when it is to be called at the latest.
        """
        if news >= 0:
            self._selector.register(news, selectors.EVENT_READ, lambda: None)
        self._processes = self._all_processes()
        while self.supervisor.phase is not RoundPhase.DONE:
            self._step(attend, look_at())
        for fd in list(self._pipes):
            self._drain(fd)

    def close(self) -> None:
        """Kill what is left, and release everything; safe after any error."""
        if self._place.health is not None:
            self._place.health.running = False
        if self.supervisor.phase is not RoundPhase.DONE:
            self._all_processes().kill_all()
        for rank in (*self.ranks, *self._retired):
            rank.release()
        self._selector.close()

    def warn_of_no_elastic(self, why: str) -> None:
        """Say once that a program which was started with --elastic does not recover by itself."""
        spec = self._place.spec
        if spec.elastic and spec.kind != "executable" and not self._elastic:
            self._elastic = True
            self._terminal.say(f"--elastic: no rank has called dure.elastic.run; {why}")

    # --- what is known of it -----------------------------------------------------------------

    def catches(self, number: int) -> bool:
        """Return whether a rank has a handler for signal `number`."""
        return any(process.catches(number) for process in self.ranks)

    def results(self) -> tuple[RankResult, ...]:
        """Return what is known of every rank of this host."""
        return tuple(map(self.result, range(len(self.ranks))))

    def result(self, local_rank: int) -> RankResult:
        """Return what is known of one rank."""
        process, report = self.ranks[local_rank], self.reports[local_rank]
        place, number = self._place, self._numbers.get(local_rank, self.round.number)
        path = error_file(place.spec, place.address.name, process.rank, number)
        expected = Exit(signal=9) if report.crash is None else Exit(code=report.crash.exit_code)
        status = self.supervisor.exits.get(local_rank, expected)
        return RankResult(
            rank=process.rank,
            host=place.host,
            pid=process.pid,
            exit=status,
            ended_by_launcher=local_rank in self.supervisor.ended_by_launcher,
            crash=known_crash(path, report.crash, status) or self._hang_of(local_rank),
            stack=report.stack,
            last=report.last,
            progress="" if report.step is None else str(report.step),
            finished=report.finished,
        )

    def _hang_of(self, local_rank: int) -> Crash | None:
        """Describe a hang as the crash of the rank that probably caused it."""
        if local_rank not in self.supervisor.hung_ranks:
            return None
        stack = self.reports[local_rank].stack
        lines = [f'  File "{f.file}", line {f.line}, in {f.function}' for f in reversed(stack)]
        after_s = self._place.spec.hang_timeout_s
        said = f"no output, no step and no finished operation for {after_s:g} s"
        shown = "\n".join(["Stack (most recent call last):", *lines, f"{HANG}: {said}"])
        return Crash(type=HANG, message=said, traceback=shown)

    # --- its processes -----------------------------------------------------------------------

    def _started(self, local_rank: int, layout: Round) -> RankProcess:
        place, rank = self._place, self.round.rank(local_rank)
        variables = rank_variables(place.spec, local_rank, place.address, layout, self._threads)
        environment = env.child_environment(variables)
        secrets, zygote = place.address.secrets, place.zygote
        return start_rank(place.spec, rank, environment, secrets, zygote, local_rank)

    def _watch(self, local_rank: int) -> None:
        process = self.ranks[local_rank]
        self._terminal.started(process)
        streams: tuple[Stream, Stream] = ("stdout", "stderr")
        for pipe, stream in zip((process.stdout, process.stderr), streams, strict=True):
            reader = self._terminal.reader(process.rank, stream)
            self._pipes[pipe.fileno()] = partial(self._output, reader)
        self._pipes[process.report_fd] = partial(self._reported, local_rank)
        for fd in (process.stdout.fileno(), process.stderr.fileno(), process.report_fd):
            os.set_blocking(fd, False)
            if self._reading or fd == process.report_fd:
                self._selector.register(fd, selectors.EVENT_READ, partial(self._readable, fd))
        ended = partial(self._ended, local_rank)
        self._selector.register(process.pidfd, selectors.EVENT_READ, ended)

    def _all_processes(self) -> JobProcesses:
        """Return the job's processes on this host, without the launcher's own."""
        place = self._place
        ranks = start_times(rank.pid for rank in (*self.ranks, *self._retired))
        if place.reaper is not None:
            place.reaper.watch(ranks)
        spared = [own.pid for own in (place.zygote, place.reaper) if own is not None]
        return JobProcesses(ranks, place.address.name, spared, below=os.getpid(), since=place.since)

    # --- what happens ------------------------------------------------------------------------

    def _step(self, attend: Callable[[float], list[Measure]] | None, look_at: float | None) -> None:
        """Wait for something to happen, and deal with it."""
        self._watch_terminal()
        hang_at = None if self.hang is None else self.hang.wake_at
        running = self.supervisor.phase is RoundPhase.RUNNING
        reap_at = self._reap_at if running else None
        times = (self.supervisor.wake_at, self._terminal.wake_at, look_at, hang_at, reap_at)
        wakes = [t for t in times if t is not None]
        timeout = max(0.0, min(wakes) - time.monotonic()) if wakes else None
        for key, _ in self._selector.select(timeout):
            key.data()
        now = time.monotonic()
        self._terminal.tick(now)
        if self._terminal.broken and self.supervisor.interrupted_by is None:
            self._terminal.say(self._terminal.why_broken)
            self._do(self.supervisor.interrupted(signal.SIGPIPE, now))
        self._do(self.supervisor.tick(now))
        self._look_for_hang(now)
        self._reap(now)
        if attend is not None and self.supervisor.phase is not RoundPhase.DONE:
            self._do(attend(now))

    def _reap(self, now: float) -> None:
        """Reap orphans of the ranks from time to time, not the caller's own children.

        Process 1 of a container reaps those of all programs.
        """
        if now >= self._reap_at and self.supervisor.phase is RoundPhase.RUNNING:
            self._processes.others()
            if os.getpid() == 1:
                own = (*self.ranks, *self._retired, self._place.zygote, self._place.reaper)
                reap_orphans(process.pid for process in own if process is not None)
            self._reap_at = time.monotonic() + _REAP_S

    def _look_for_hang(self, now: float) -> None:
        """Ask quiet ranks for their last operation; end the round if it does not change."""
        alive = self.supervisor.alive
        if self.hang is None or not alive:
            return
        if self.supervisor.phase is not RoundPhase.RUNNING:
            self.hang = None
            return
        last = {rank: self.reports[rank].last for rank in alive}
        match self.hang.tick(last, now):
            case "ask":
                self._ask(alive)
            case "hung":
                self.hang.active(now)
                self._terminal.note("hung", after_s=self._place.spec.hang_timeout_s)
                for rank in alive if self._place.spec.trace_dir is not None else ():
                    self.ranks[rank].ask_record()
                self._end_hang(likely_cause(last), now)
            case _:
                return

    def _end_hang(self, local_rank: int, now: float) -> None:
        """End the round, or the rank alone if the others may continue without it."""
        measures = self.supervisor.hung(local_rank, now)
        crash = self._hang_of(local_rank)
        if crash is not None and self.supervisor.policy is Policy.HOLD:
            self._terminal.say(f"rank {self.round.rank(local_rank)} hangs, and is killed:")
            for line in crash.traceback.splitlines():
                self._terminal.say(f"  {line}")
        self._do(measures)

    def _active(self) -> None:
        """Note that a rank has shown a sign of work."""
        if self.hang is not None:
            self.hang.active(time.monotonic())

    def _watch_terminal(self) -> None:
        """Wait for slow readers, and let the ranks wait for them, too."""
        for sink in self._terminal.sinks:
            if sink.waiting and sink.fd not in self._watched_sinks:
                with contextlib.suppress(PermissionError):  # a file: never makes us wait
                    self._selector.register(
                        sink.fd, selectors.EVENT_WRITE, partial(self._room, sink)
                    )
                    self._watched_sinks.add(sink.fd)
        if self._reading == self._terminal.full:
            self._reading = not self._terminal.full
            for rank in self.ranks:
                self._pause_or_resume(rank.stdout.fileno())
                self._pause_or_resume(rank.stderr.fileno())

    def _pause_or_resume(self, fd: int) -> None:
        if fd not in self._pipes:
            return
        if self._reading:
            self._selector.register(fd, selectors.EVENT_READ, partial(self._readable, fd))
        else:
            self._selector.unregister(fd)

    def _room(self, sink: Sink) -> None:
        sink.write_some()
        if not sink.waiting:
            self._selector.unregister(sink.fd)
            self._watched_sinks.discard(sink.fd)

    def _readable(self, fd: int) -> bool:
        """Read once from a pipe, and watch it no more at its end; False: nothing was there."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._pipes[fd](data)
        else:
            self._forget(fd)
        return bool(data)

    def _drain(self, fd: int) -> None:
        """Read all that is in a pipe now."""
        while fd in self._pipes and self._readable(fd):
            pass

    def _forget(self, fd: int) -> None:
        self._pipes.pop(fd, None)
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def _output(self, reader: LineReader, data: bytes) -> None:
        self._active()
        self._terminal.received(reader, data, time.monotonic())

    def _reported(self, rank: int, data: bytes) -> None:
        report = self.reports[rank]
        had_crash, had_stack = report.crash is not None, report.answered
        signs = report.signs_of_work
        report.feed(data)
        if report.signs_of_work > signs:
            self._active()
        self._elastic = self._elastic or report.elastic
        now = time.monotonic()
        crash = None if had_crash else report.crash
        self._terminal.reported(self.ranks[rank].rank, crash, report.step)
        if report.answered and not had_stack:
            self._do(self.supervisor.explained(rank, now))
        if crash is not None:
            self._do(self.supervisor.crashed(rank, now))

    def _ended(self, local_rank: int) -> None:
        process = self.ranks[local_rank]
        status = process.exit()
        if status is None:
            return
        self._selector.unregister(process.pidfd)
        self._drain(process.report_fd)  # its last words come before its end
        self._terminal.ended(process, status)
        self._do(self.supervisor.exited(local_rank, status, time.monotonic()))

    def _signalled(self) -> None:
        """Pass warnings on to the ranks; report signals that end the job to the supervisor."""
        for number in sorted(read_signals(self._place.signals), key=leaves_no_time):
            if number in self._place.spec.signals:
                caught = self.catches(number)
                self._do(self.supervisor.interrupted(number, time.monotonic(), caught=caught))
            elif number == signal.SIGTSTP:
                self._stop_and_continue()
            else:
                for rank in self.supervisor.alive:
                    self.ranks[rank].signal(number)

    def _stop_and_continue(self) -> None:
        """Stop the job and this launcher (Ctrl-Z); continue when the shell continues the launcher.

        The ranks get SIGSTOP, for the kernel ignores SIGTSTP to sessions without a terminal.
        """
        self._signal_all(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_all(signal.SIGCONT)
        self._active()

    def _signal_all(self, number: int) -> None:
        """Signal every process of the job."""
        for process in self._processes.others():
            self._processes.signal(process.pid, number)
        for rank in self.supervisor.alive:
            self.ranks[rank].signal(number)

    # --- what is done about it ---------------------------------------------------------------

    def _do(self, measures: list[Measure]) -> None:
        """Carry out measures of the supervisor, and those that follow from them."""
        for measure in measures:
            if isinstance(measure, AskStacks):
                self._ask(measure.ranks)
            elif isinstance(measure, Signal):
                self._send(measure)
            elif isinstance(measure, Kill):
                self.ranks[measure.rank].signal(signal.SIGKILL)
            else:
                self._sweep()

    def _sweep(self) -> None:
        """Count the processes left; those that successful ranks detached stay, and are named."""
        spares = self.supervisor.spares_detached
        others = self._processes.others(detached=not spares)
        self._do(self.supervisor.swept(len(others), time.monotonic()))
        if spares and not others:
            detached = self._processes.others()
            left = ", ".join(f"{process.command} (pid {process.pid})" for process in detached)
            if left:
                self._terminal.say(f"left running, in sessions of their own: {left}")

    def _ask(self, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            self.reports[rank].asked()
            if not self.ranks[rank].ask_stack():
                self._do(self.supervisor.explained(rank, time.monotonic()))

    def _send(self, measure: Signal) -> None:
        """Signal ranks last: a parent that ends first would turn its children into orphans."""
        spares = self.supervisor.spares_detached
        others = self._processes.others(detached=not spares) if measure.everything else []
        for process in others:
            if self._processes.signal(process.pid, measure.number) and not self.supervisor.alive:
                self.outlived[process.pid] = process.command
        for rank in self.supervisor.alive:
            if measure.number == signal.SIGINT:
                self.ranks[rank].interrupt()
            else:
                self.ranks[rank].signal(measure.number)


def _timing(spec: JobSpec) -> Timing:
    settle_s = 0.0 if spec.trace_dir is None else _SETTLE_S
    if spec.grace_s is None:
        return Timing(settle_s=settle_s)
    return Timing(
        grace_s=spec.grace_s,
        interrupt_grace_s=spec.grace_s,
        saving_s=spec.grace_s,
        settle_s=settle_s,
    )
