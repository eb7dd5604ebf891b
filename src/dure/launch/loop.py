"""The loop between the ranks, the user and the supervisor.

One thread, one selector. It waits for any of: output and reports of the ranks (pipes), their ends
(pidfds), signals to the launcher (a pipe), a terminal that can take more, and the next deadline.
What happens is told to the supervisor (`dure.launch.supervisor`), and what that answers is done.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from dure.launch.ranks.processes import JobProcesses
from dure.launch.ranks.report import ReportReader
from dure.launch.ranks.spawn import RankProcess
from dure.launch.show.output import LineReader, Sink
from dure.launch.show.terminal import Terminal
from dure.launch.signals import read_signals, take_warnings
from dure.launch.spec import Stream
from dure.launch.supervisor import Action, AskStacks, Phase, Signal, Supervisor

__all__ = ["JobLoop", "Overseer", "drain"]

_CHUNK = 1 << 16
_SESSION_S = 1.0  # for what a rank that is replaced has left running to die
_LAST_WORDS_S = 0.3  # how long an interrupted job waits for who reads its output


class Overseer(Protocol):
    """Who is asked after everything that happens, and may know of other hosts."""

    @property
    def fd(self) -> int:
        """Readable when it wants to be asked; -1: never."""
        ...

    @property
    def wake_at(self) -> float | None:
        """When to ask at the latest."""
        ...

    def attend(self, now: float) -> list[Action]:
        """Look at what has happened, and return what to do about it."""
        ...


class JobLoop:
    """A round that runs on this host.

    Args:
        job: The job's name in the environment of its processes.
        supervisor: Who decides, for as many ranks as will be added.
        terminal: Where their output goes.
        signals: The pipe in which signals to the launcher arrive.
    """

    def __init__(self, job: str, supervisor: Supervisor, terminal: Terminal, signals: int) -> None:
        self.terminal = terminal
        self.supervisor = supervisor
        self.ranks: list[RankProcess] = []
        self.reports: list[ReportReader] = []
        self.outlived: dict[int, str] = {}
        self.elastic = False  # a rank has entered `dure.elastic.run`
        self.spared: tuple[int, ...] = ()  # the launcher's own processes: see JobProcesses
        self._job = job
        self._processes = JobProcesses((), job)
        self._signals = signals
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[int, Callable[[bytes], None]] = {}  # descriptor to who takes its bytes
        self._watched_sinks: set[int] = set()
        self._reading = True
        self._overseer: Overseer | None = None
        self._retired: list[RankProcess] = []  # replaced by others
        self._selector.register(signals, selectors.EVENT_READ, self._signalled)

    def add(self, process: RankProcess) -> None:
        """Watch a rank that was just started, the next of this host."""
        self.ranks.append(process)
        self.reports.append(ReportReader())
        self._listen(len(self.ranks) - 1)

    def replace(self, local_rank: int, process: RankProcess) -> None:
        """Watch a process that was started in place of one that has ended."""
        old = self.ranks[local_rank]
        session = f"none but those of {old.pid}"
        JobProcesses((old.pid,), session, below=os.getpid()).kill_all(_SESSION_S)
        self._retired.append(old)  # a zombie that keeps its session's number
        for fd in (old.stdout.fileno(), old.stderr.fileno(), old.report_fd):
            self._drain(fd)
            self._forget(fd)
        self.ranks[local_rank] = process
        self.reports[local_rank] = ReportReader()
        self._listen(local_rank)
        self._processes = self._all_processes()
        self.supervisor.replaced(local_rank)

    def _listen(self, local_rank: int) -> None:
        process = self.ranks[local_rank]
        self.terminal.started(process)
        streams: tuple[Stream, Stream] = ("stdout", "stderr")
        for pipe, stream in zip((process.stdout, process.stderr), streams, strict=True):
            reader = self.terminal.reader(process.rank, stream)
            self._pipes[pipe.fileno()] = partial(self._output, reader)
        self._pipes[process.report_fd] = partial(self._reported, local_rank)
        for fd in (process.stdout.fileno(), process.stderr.fileno(), process.report_fd):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, partial(self._readable, fd))
        ended = partial(self._ended, local_rank)
        self._selector.register(process.pidfd, selectors.EVENT_READ, ended)

    def oversee(self, overseer: Overseer) -> None:
        """Ask `overseer` from now on."""
        self._overseer = overseer
        if overseer.fd >= 0:
            self._selector.register(overseer.fd, selectors.EVENT_READ, lambda: None)

    def run(self) -> None:
        """Return when no process of the job is left."""
        self._processes = self._all_processes()
        while self.supervisor.phase is not Phase.DONE:
            self._step()
        self._read_what_is_left()

    def close(self) -> None:
        """Kill what is left of the job, and release everything; safe after any error."""
        if self.supervisor.phase is not Phase.DONE:
            self._all_processes().kill_all()
        for rank in (*self.ranks, *self._retired):
            rank.release()
        self._selector.close()

    def _all_processes(self) -> JobProcesses:
        pids = tuple(rank.pid for rank in (*self.ranks, *self._retired))
        return JobProcesses(pids, self._job, self.spared, below=os.getpid())

    def _step(self) -> None:
        """Wait for something to happen, and deal with it."""
        self._watch_terminal()
        times = [self.supervisor.wake_at, self.terminal.wake_at]
        times += [self._overseer.wake_at] if self._overseer is not None else []
        wakes = [t for t in times if t is not None]
        timeout = max(0.0, min(wakes) - time.monotonic()) if wakes else None
        for key, _ in self._selector.select(timeout):
            key.data()
        now = time.monotonic()
        self.terminal.tick(now)
        if self.terminal.broken and self.supervisor.interrupted_by is None:
            self.terminal.say(self.terminal.why_broken)
            self._do(self.supervisor.interrupted(signal.SIGPIPE, now))
        self._do(self.supervisor.tick(now))
        if self._overseer is not None and self.supervisor.phase is not Phase.DONE:
            self._do(self._overseer.attend(now))

    def _watch_terminal(self) -> None:
        """Wait for slow readers, and let the ranks wait for them, too."""
        for sink in self.terminal.sinks:
            if sink.waiting and sink.fd not in self._watched_sinks:
                with contextlib.suppress(PermissionError):  # a file: never makes us wait
                    self._selector.register(
                        sink.fd, selectors.EVENT_WRITE, partial(self._room, sink)
                    )
                    self._watched_sinks.add(sink.fd)
        if self._reading == self.terminal.full:
            self._reading = not self.terminal.full
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

    def _readable(self, fd: int) -> None:
        """Read once from a pipe; at its end, watch it no more."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        if data:
            self._pipes[fd](data)
        else:
            self._forget(fd)

    def _forget(self, fd: int) -> None:
        self._pipes.pop(fd, None)
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def _drain(self, fd: int) -> None:
        """Read all that is in a pipe now."""
        while fd in self._pipes:
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._forget(fd)
                return
            self._pipes[fd](data)

    def _read_what_is_left(self) -> None:
        for fd in list(self._pipes):
            self._drain(fd)

    def _output(self, reader: LineReader, data: bytes) -> None:
        self.terminal.received(reader, data, time.monotonic())

    def _reported(self, rank: int, data: bytes) -> None:
        report = self.reports[rank]
        had_crash, had_stack = report.crash is not None, report.told
        report.feed(data)
        self.elastic = self.elastic or report.elastic
        now = time.monotonic()
        self.terminal.reported(
            self.ranks[rank].rank, None if had_crash else report.crash, report.step
        )
        if report.told and not had_stack:
            self._do(self.supervisor.told(rank, now))
        if report.crash is not None and not had_crash:
            self._do(self.supervisor.crashed(rank, now))

    def _ended(self, local_rank: int) -> None:
        process = self.ranks[local_rank]
        exit = process.exit()
        if exit is None:
            return
        self._selector.unregister(process.pidfd)
        self._drain(process.report_fd)  # its last words come before its end
        self.terminal.ended(process, exit)
        self._do(self.supervisor.exited(local_rank, exit, time.monotonic()))

    def _signalled(self) -> None:
        """Pass warnings on to the ranks; tell the supervisor of signals that end the job."""
        for number in read_signals(self._signals):
            caught = any(rank.catches(number) for rank in self.ranks)
            self._do(self.supervisor.interrupted(number, time.monotonic(), caught=caught))
        for number in take_warnings():
            for rank in self.supervisor.alive:
                self.ranks[rank].signal(number)

    def _do(self, actions: list[Action]) -> None:
        """Carry out what the supervisor wants, and what it wants upon that."""
        for action in actions:
            if isinstance(action, AskStacks):
                self._ask(action.ranks)
            elif isinstance(action, Signal):
                self._send(action)
            else:
                self._sweep()

    def _sweep(self) -> None:
        """Count what is left; what successful ranks have detached stays, and is named."""
        spares = self.supervisor.spares_detached
        others = self._processes.others(detached=not spares)
        self._do(self.supervisor.swept(len(others), time.monotonic()))
        if spares and not others:
            left = [
                f"{process.command} (pid {process.pid})" for process in self._processes.others()
            ]
            if left:
                self.terminal.say(f"left running, in sessions of their own: {', '.join(left)}")

    def _ask(self, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            if not self.ranks[rank].ask_stack():
                self._do(self.supervisor.told(rank, time.monotonic()))

    def _send(self, action: Signal) -> None:
        """Signal ranks last: a parent that ends first would turn its children into orphans."""
        spares = self.supervisor.spares_detached
        others = self._processes.others(detached=not spares) if action.everything else []
        for process in others:
            if self._processes.signal(process.pid, action.number) and not self.supervisor.alive:
                self.outlived[process.pid] = process.command
        for rank in self.supervisor.alive:
            if action.number == signal.SIGINT:
                self.ranks[rank].interrupt()
            else:
                self.ranks[rank].signal(action.number)


def drain(terminal: Terminal, signals: int, *, in_haste: bool) -> None:
    """Wait until the last output is taken; after an interruption, not for long."""
    deadline = time.monotonic() + _LAST_WORDS_S
    while any(sink.waiting for sink in terminal.sinks):
        if in_haste and time.monotonic() > deadline:
            break
        for sink in terminal.sinks:
            sink.drain(0.05)
        if read_signals(signals):
            break
