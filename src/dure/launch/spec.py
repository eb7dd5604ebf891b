"""The values of a launch: what to start (`JobSpec`) and what came of it (`JobResult`).

Words. A *job* is one program started `nproc` times; each start is a *rank*. A rank *crashes* when
an exception leaves its main module, and *exits* when its process ends. The job *fails* with the
first rank that does either with something other than success; its *first failure* is that rank's
result, which explains the others, for they mostly fail as a consequence.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dure.errors import LaunchError

__all__ = [
    "Crash",
    "Exit",
    "Frame",
    "JobResult",
    "JobSpec",
    "Kind",
    "Line",
    "RankResult",
    "Stream",
    "signal_name",
]

Stream = Literal["stdout", "stderr"]
Kind = Literal["script", "module", "executable"]


def signal_name(number: int) -> str:
    """Return the name of signal `number`, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, slots=True)
class Line:
    """One line that a rank wrote, as bytes and without its newline."""

    rank: int
    stream: Stream
    text: bytes


def _no_variables() -> dict[str, str | None]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What to start.

    Args:
        program: A Python file, a module's name or a program, as `kind` says.
        args: What the program finds in `sys.argv[1:]`.
        kind: "script" is `python FILE`, "module" is `python -m NAME`, "executable" any program.
        nproc: How many ranks to start.
        env: Variables for the ranks, over those of this process; None removes one.
        key: The job's key; without one, one is minted for this job alone.
        log_dir: Where to keep each rank's output as it came, besides showing it.
        trace_dir: Where the ranks write their flight records. When one fails, the others get a
            second to fail because of it, and to write theirs, before they are ended.
        on_line: Gets each line in place of the terminal. It runs on the thread of `run_job`, and
            the ranks' output waits for it.
        stdin: "rank0": rank 0 reads this process's standard input; "none": nobody does.
        grace_s: Seconds from asking the ranks to end until they are killed; by default 5 after a
            failure and 0.6 after Ctrl-C or SIGTERM.
        keep_going: A rank that fails does not end the job; the others may go on without it
            (`dure.shrink`). The job succeeds if one of them does.
        quiet: Say nothing of the launcher's own: no hints, no summary of a failure.
    """

    program: str
    args: tuple[str, ...] = ()
    kind: Kind = "script"
    nproc: int = 1
    env: Mapping[str, str | None] = field(default_factory=_no_variables)
    key: bytes | None = None
    log_dir: Path | None = None
    trace_dir: Path | None = None
    on_line: Callable[[Line], None] | None = None
    stdin: Literal["rank0", "none"] = "rank0"
    grace_s: float | None = None
    keep_going: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """One level of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The exception that left a rank's main module.

    `peer` is the rank the exception blames (`PeerLost.peer`), if it blames one; `exit_code` is
    what the interpreter is about to exit with.
    """

    type: str
    message: str
    traceback: str
    exit_code: int = 1
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: with an exit code, or by a signal."""

    code: int | None = None
    signal: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the process says it succeeded."""
        return self.code == 0

    @property
    def status(self) -> int:
        """The number a shell would show: the code, or 128 + the signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}"
        return f"exit code {self.code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What became of one rank.

    `ended_by_launcher` says that it was still running when the job had to end. `stack` is where
    its main thread was at the moment of the first failure, innermost frame first.
    """

    rank: int
    host: str
    pid: int
    exit: Exit
    ended_by_launcher: bool = False
    crash: Crash | None = None
    stack: tuple[Frame, ...] = ()

    @property
    def status(self) -> int:
        """The exit code that the rank chose, even if it was ended on its way out."""
        if self.crash is not None and (self.ended_by_launcher or self.exit.ok):
            return self.crash.exit_code
        return self.exit.status


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What became of the job.

    `exit_code` is what the command `dure run` exits with: 0, the first failure's, or 128 + the
    signal that interrupted the launcher. A job that kept going may have both, a first failure and
    0. `outlived` are the processes, as (pid, command), that the ranks left behind and the launcher
    ended.
    """

    exit_code: int
    ranks: tuple[RankResult, ...]
    elapsed_s: float
    first_failure: RankResult | None = None
    interrupted_by: int | None = None
    outlived: tuple[tuple[int, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every rank succeeded, or one of a job that kept going."""
        return self.exit_code == 0

    def check(self) -> None:
        """Raise `LaunchError`, which carries the first failure, unless every rank succeeded."""
        if self.ok:
            return
        failure = self.first_failure
        if failure is None:
            raise LaunchError("the job was interrupted", report=self)
        seen = f"{failure.crash.type}: {failure.crash.message}" if failure.crash else ""
        raise LaunchError(
            f"rank {failure.rank} of the job failed with {failure.exit}",
            report=failure,
            peer=failure.rank,
            elapsed_s=self.elapsed_s,
            seen=seen,
        )
