"""Starting one rank, and what the launcher holds of it.

A rank is forked from the zygote (`zygote`), or else started by `subprocess` (vfork and
exec: nothing of the launcher runs in between). Either way it is a child of the launcher, in a
session of its own, so that the terminal's Ctrl-C reaches the launcher alone and it alone decides.
The launcher holds three pipes (output, errors, reports) and a pidfd. The rank is not reaped when it
ends: its zombie keeps the number of its session from being reused until the job is over.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any  # Any: torch, which is not loaded here

from dure import env
from dure.launch.interpreter import interpreter_options
from dure.launch.ranks import child, forking
from dure.launch.ranks.cores import binding_of
from dure.launch.ranks.zygote import RankStart, Zygote
from dure.launch.signals import PASSED_ON
from dure.launch.spec import Exit, JobSpec, Kind

__all__ = ["RankProcess", "open_descriptors", "start_rank"]

_CHILD = str(Path(__file__).with_name("child.py"))


@dataclass(slots=True)
class RankProcess:
    """A started rank: its process and the launcher's ends of its pipes.

    `stdout` and `stderr` are pipes with the rank's output, `report_fd` one with its reports.
    `fresh` is set for a rank that was not forked from the zygote.
    """

    rank: int
    host: str
    kind: Kind
    pid: int
    pidfd: int
    stdout: io.FileIO
    stderr: io.FileIO
    report_fd: int
    fresh: subprocess.Popen[bytes] | None = None

    def exit(self) -> Exit | None:
        """Return how the process ended, or None while it runs; it stays a zombie."""
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        if info.si_code == os.CLD_EXITED:
            return Exit(code=info.si_status)
        return Exit(signal=info.si_status)

    def signal(self, number: int) -> None:
        """Send a signal, which is nothing to a process that has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def ask_stack(self) -> bool:
        """Ask for the Python stack; False if the rank cannot answer.

        The signal kills a process that does not catch it: one that is still starting, or one whose
        program was replaced by exec.
        """
        if not self.catches(child.STACK_SIGNAL):
            return False
        self.signal(child.STACK_SIGNAL)
        return True

    def ask_record(self) -> None:
        """Ask for the flight record; without effect on a rank that has not joined a group."""
        if self.catches(child.RECORD_SIGNAL):
            self.signal(child.RECORD_SIGNAL)

    def interrupt(self) -> None:
        """Send SIGINT to the program, but end an interpreter that has not come to it yet.

        While it still starts, an interpreter would answer SIGINT with a traceback of no use.
        """
        ready = self.kind == "executable" or self.catches(child.STACK_SIGNAL)
        self.signal(signal.SIGINT if ready else signal.SIGTERM)

    def catches(self, number: int) -> bool:
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return False
        caught = next((x for x in status.splitlines() if x.startswith("SigCgt:")), "SigCgt: 0")
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)

    def release(self) -> None:
        """Reap the process, which must have ended, and close what the launcher holds of it."""
        if self.fresh is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.fresh.wait(timeout=0)
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)
        self.close()

    def close(self) -> None:
        """Close what the launcher holds of the process, which stays a zombie; again is nothing."""
        self.stdout.close()
        self.stderr.close()
        for fd in (self.report_fd, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.report_fd = self.pidfd = -1


def start_rank(
    spec: JobSpec,
    rank: int,
    variables: Mapping[str, str],
    secrets: tuple[int, ...],
    zygote: Zygote | None = None,
    local_rank: int | None = None,
) -> RankProcess:
    """Start one rank with the environment `variables`, forked from the zygote if there is one.

    `secrets` are descriptors that it inherits, under their numbers: the key, and a password.
    `local_rank` is its number on this host, which is `rank` unless there are several hosts.

    Raises:
        OSError: The process cannot be started; nothing of it is left.
    """
    with contextlib.ExitStack() as on_error, contextlib.ExitStack() as theirs:
        ends: list[int] = []
        pipes: list[int] = []
        for _ in range(3):
            read, write = os.pipe()
            on_error.callback(os.close, read)
            theirs.callback(os.close, write)
            ends.append(read)
            pipes.append(write)
        local = rank if local_rank is None else local_rank
        if spec.inherits_terminal:  # the launcher finds the pipes at their end
            pipes[:2] = [fd if os.isatty(fd) else pipes[fd - 1] for fd in (1, 2)]
        start = RankStart(
            spec=spec,
            args=tuple(x.replace("${local_rank}", str(local)) for x in spec.args),  # torchrun's
            variables=variables,
            binding=binding_of(spec, local),
            reads_stdin=spec.stdin == "rank0" and rank == 0 and sys.__stdin__ is not None,
            pipes=(pipes[0], pipes[1], pipes[2]),
            secrets=secrets,
            launcher=os.getpid(),
        )
        pid = fresh = None
        if spec.call is not None:
            pid = _copy(start, spec.call)
        elif zygote is not None:
            pid = zygote.fork(start)
        if pid is None:
            fresh = _fresh(start)
        pid = fresh.pid if fresh is not None else pid
        assert pid is not None
        pidfd = _watched(pid, fresh)
        on_error.pop_all()
    return RankProcess(
        *(rank, socket.gethostname(), spec.kind, pid, pidfd),
        *(io.FileIO(ends[0]), io.FileIO(ends[1]), ends[2], fresh),
    )


def _watched(pid: int, fresh: subprocess.Popen[bytes] | None) -> int:
    """Return a descriptor of the process that was just started; end it if there is none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)  # it is ours, and not reaped: the number is still its own
        os.waitpid(pid, 0) if fresh is None else fresh.wait()
        raise


def _fresh(start: RankStart) -> subprocess.Popen[bytes]:
    spec, (stdout, stderr, report) = start.spec, start.pipes
    return subprocess.Popen(
        [
            *(sys.executable, *interpreter_options(), _CHILD),
            *(str(report), str(start.launcher), start.binding),
            *(spec.kind, spec.program, *start.args),
        ],
        stdin=None if start.reads_stdin else subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=dict(start.variables),
        pass_fds=(report, *start.secrets),
        start_new_session=True,
    )


def _copy(start: RankStart, call: Callable[[], None]) -> int:
    """Fork a rank of this very process, that calls `call` (`dure.spawn`); return its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: `dure.spawn` has looked
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = child.run_function(_settle(start), lambda: _run(call))
            try:
                util._run_finalizers()  # pyright: ignore
            except SystemExit:  # an error in the background that the function has not seen
                code = code or 1
        finally:
            os._exit(code)
    return pid


def open_descriptors() -> frozenset[int]:
    """Return the numbers of this process's open descriptors."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]  # and of the one it reads
    return frozenset(fd for fd in numbers if os.path.exists(f"/proc/self/fd/{fd}"))


def _settle(start: RankStart) -> int:
    """Release what is the launcher's; return the pipe for reports.

    The launcher's descriptors are closed: as long as a copy of the reaper's link is open, here or
    in a child, the reaper does not learn of the launcher's death.
    """
    for fd in open_descriptors() - start.spec.kept_fds - {0, 1, 2, *start.pipes, *start.secrets}:
        os.close(fd)
    signal.set_wakeup_fd(-1)
    for number in {*start.spec.signals, *PASSED_ON}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stdout, stderr, report = start.pipes
    order = {
        "environment": dict(start.variables),
        "numbers": [0, 1, 2, *start.secrets],
    }
    fds = [os.open(os.devnull, os.O_RDONLY), stdout, stderr, *start.secrets, report]
    for fd, name in ((1, "stdout"), (2, "stderr")):  # a notebook's go to the cell
        text = io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), "utf-8", write_through=True)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.stdin = io.TextIOWrapper(
        io.FileIO(0, closefd=False), "utf-8"
    )  # `settle` has opened it again
    report = forking.settle(order, fds, dict(env.everything()))
    child.die_with(start.launcher)
    return report


def _run(call: Callable[[], None]) -> None:
    torch: Any = sys.modules.get("torch")
    threads = env.text("OMP_NUM_THREADS") or ""
    if torch is not None and threads.isdecimal():  # read when torch was loaded, for one rank
        torch.set_num_threads(int(threads))
    call()
