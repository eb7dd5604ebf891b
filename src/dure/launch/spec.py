"""The values of a launch: what to start (`JobSpec`) and what came of it (`JobResult`).

Words. A *job* is one program started `nproc` times; each start is a *rank*. A rank *crashes* when
an exception leaves its main module, and *exits* when its process ends. The job *fails* with the
first rank that does either with something other than success; its *first failure* is that rank's
result, which explains the others, for they mostly fail as a consequence.
"""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dure.errors import LaunchError

if TYPE_CHECKING:
    from dure.launch.show.watcher import Watcher

__all__ = [
    "Crash",
    "Exit",
    "JobResult",
    "JobSpec",
    "Kind",
    "Line",
    "Numa",
    "ProcessFailure",
    "RankResult",
    "StackFrame",
    "Std",
    "Stream",
    "StreamChoice",
    "signal_name",
]

Stream = Literal["stdout", "stderr"]
Kind = Literal["script", "module", "executable"]
HANG = "Hang"
"""The `Crash.type` of a rank that was ended because the round hung."""

Numa = Literal["node", "socket", "exclusive", "core-complex"]


def signal_name(number: int) -> str:
    """Return the name of signal `number`, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Std(enum.IntFlag):
    """Which of a rank's streams are meant, with torchrun's numbers.

    Example:
        ```python
        from dure import launch

        spec = launch.JobSpec(program="train.py", redirects=launch.Std.ERR, log_dir=Path("logs"))
        assert launch.Std.ALL.has("stdout")
        ```
    """

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3

    def has(self, stream: Stream) -> bool:
        """Whether `stream` is among them."""
        return bool(self & (Std.OUT if stream == "stdout" else Std.ERR))


StreamChoice = Std | Mapping[int, Std]
"""The same streams of every rank, or some by local rank (none of the ranks not named)."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line that a rank wrote, as bytes and without its newline.

    Obtained from:
        `JobSpec.on_line` is called with them.
    """

    rank: int
    stream: Stream
    text: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What to start.

    Args:
        program: A Python file, a module's name or a program, as `kind` says.
        args: The program's arguments, `sys.argv[1:]`.
        kind: "script" is `python FILE`, "module" is `python -m NAME`, "executable" any program.
        nproc: How many ranks to start, on this host.
        env: Variables for the ranks, over those of this process; None removes one.
        call: The function that ranks call in place of a program, as forks of this process
            (`dure.spawn`).
        kept_fds: The descriptors that ranks keep of this process, with `call`.
        key: The job's key; without one, one is minted for this job alone.
        log_dir: A folder for files with each rank's output as it came; it is shown as well.
        trace_dir: Where the ranks write their flight records. When one fails, the others get a
            second to fail because of it, and to write theirs, before they are ended. Ranks that
            `hang_timeout_s` ends write theirs as well.
        on_line: Gets each line in place of the terminal. It runs on the thread of `run_job`, and
            the ranks' output waits for it.
        stdin: "rank0": rank 0 reads this process's standard input; "none": no rank does.
        grace_s: Seconds from asking the ranks to end until they are killed; by default 5 after a
            failure and 0.6 after Ctrl-C or SIGTERM.
        keep_going: A rank that fails does not end the job; the others may continue without it
            (`dure.shrink`). The job succeeds if one of them does.
        quiet: Say nothing of the launcher's own: no hints, no summary of a failure.
        nnodes: How many hosts, at least and at most.
        node_rank: This host's number, where the user fixed it.
        endpoint: host:port of the job's store; None: on this host, at any port (one host only).
        local_addr: The address by which other hosts reach this one; None: found.
        serves: Whether this host holds the job's store; None: if the endpoint is one of its
            addresses, or it is number 0.
        master_addr: MASTER_ADDR of the ranks of a job on one host; None: 127.0.0.1.
        master_port: MASTER_PORT of the ranks; None: a free port.
        run_id: The job's name, the same on every host; None: one is made up.
        rdzv_backend: Where the job's state is: "c10d" and "static", in the store of one of the
            hosts; "etcd", in the etcd servers that `endpoint` names (HOST:PORT,...), which needs a
            `run_id`.
        rdzv_conf: With etcd: files `cacert`, `cert`, `key`, a `user` and a `password_file`.
        lease_s: How long a launcher may be silent before the other hosts give it up; None:
            DURE_SILENCE, or 30 seconds.
        oversubscribe: Do not warn if memory is not likely to hold the ranks.
        join_timeout_s: How long to wait for the least number of hosts.
        last_call_s: How long to wait then for more, up to the most.
        max_restarts: How often the program may be started again, counted over all hosts.
        longest_restart_delay_s: When rounds fail within 10 seconds of their start, wait before the
            next one: 0, 1, 2, 4, ... seconds, but no longer than this.
        hang_timeout_s: If no rank writes a line, reports a step or finishes an operation for so
            long, show where all ranks are and end the round as failed; with `elastic` or
            `keep_going`, kill the rank that the others probably wait for. None: never.
        on_event: Called with each event of the job: a dict with "time", "event" and what the
            event is about (docs/output.md lists them). It runs on the thread of `run_job`, and an
            exception that it raises ends the job.
        event_log: A file for the events, one JSON object per line.
        health_port: Answer HTTP requests there, for probes of Kubernetes (`launch.health`).
        elastic: The program outlives deaths itself (`dure.elastic`): dead ranks are replaced, and
            the living left alone. Implies `keep_going`.
        min_ranks: An elastic job ends when fewer ranks than these live.
        zygote: Whether ranks are forked from a process that has imported torch.
        preload: Further modules that the zygote imports.
        role: ROLE_NAME of the ranks.
        redirects: Streams that go to files instead of the terminal.
        tee: Streams that go to files and to the terminal.
        local_ranks_filter: The local ranks whose output is shown; None: all.
        stdout_filters: Lines of standard output that hold one of these words are collected, too.
        stderr_filters: The same for standard error.
        malloc_defaults: Leave the C library's thresholds as they are, and do not have it keep the
            memory that a training step frees (`launch.ranks.environment`).
        stand_in: "gloo": in stock torch, Dure replaces Gloo (`dure.torch_backend.stand_in`).
        numa: How ranks are bound to cores: node, socket, exclusive or core-complex; None: not.
        virtual_local_rank: Each rank sees one GPU, as its device 0, and has LOCAL_RANK 0.
        signals: Signals to the launcher that end the job.
        prefix: Prefix of each line.
        fold: Show equal lines of several ranks once.
        timestamps: Put the time of day before each line.
        log_max_bytes: Start another file when a log file has this size; None: no limit.
        log_keep: How many of the earlier files of each log to keep.
        watcher: Gets the ranks' ends, reports and output, too.

    Example:
        ```python
        spec = launch.JobSpec(program="train.py", args=("--lr", "0.1"), nproc=4, max_restarts=2)
        # launch.run_job(spec) runs it
        ```
    """

    program: str
    args: tuple[str, ...] = ()
    kind: Kind = "script"
    nproc: int = 1
    env: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    call: Callable[[], None] | None = field(default=None, repr=False)
    kept_fds: frozenset[int] = frozenset()
    key: bytes | None = field(default=None, repr=False)
    log_dir: Path | None = None
    trace_dir: Path | None = None
    on_line: Callable[[Line], None] | None = None
    stdin: Literal["rank0", "none"] = "rank0"
    grace_s: float | None = None
    keep_going: bool = False
    quiet: bool = False
    nnodes: tuple[int, int] = (1, 1)
    node_rank: int | None = None
    endpoint: str | None = None
    local_addr: str | None = None
    serves: bool | None = None
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str | None = None
    rdzv_backend: Literal["c10d", "static", "etcd"] = "c10d"
    rdzv_conf: Mapping[str, str] = field(default_factory=dict[str, str])
    lease_s: float | None = None
    oversubscribe: bool = False
    join_timeout_s: float = 600.0
    last_call_s: float = 5.0
    max_restarts: int = 0
    longest_restart_delay_s: float = 30.0
    hang_timeout_s: float | None = None
    on_event: Callable[[Mapping[str, object]], object] | None = field(default=None, repr=False)
    event_log: Path | None = None
    health_port: int | None = None
    elastic: bool = False
    min_ranks: int = 1
    zygote: Literal["auto", "never"] = "auto"
    preload: tuple[str, ...] = ()
    role: str = "default"
    redirects: StreamChoice = Std.NONE
    tee: StreamChoice = Std.NONE
    local_ranks_filter: frozenset[int] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    malloc_defaults: bool = False
    stand_in: Literal["gloo"] | None = None
    numa: Numa | None = None
    virtual_local_rank: bool = False
    signals: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    prefix: Literal["auto", "rank", "host", "none"] = "auto"
    fold: bool = True
    timestamps: bool = False
    log_max_bytes: int | None = None
    log_keep: int = 3
    watcher: Watcher | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("log_dir", "trace_dir", "event_log"):  # which may be given as text
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(path))

    @property
    def inherits_terminal(self) -> bool:
        """Whether a rank writes to the launcher's terminal itself.

        Only the one rank of a host does, and only if no option asks for its output.
        """
        asked = (self.log_dir, self.on_line, self.watcher, self.call, self.local_ranks_filter)
        files = (self.redirects, self.tee, self.stdout_filters, self.stderr_filters)
        asked = (*asked, self.hang_timeout_s)  # which needs to see that a rank writes
        default = self.prefix in ("auto", "none") and not self.timestamps
        return self.nproc == 1 and default and asked == (None,) * len(asked) and not any(files)


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One level of a Python stack.

    Obtained from:
        `RankResult.stack`.
    """

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

    Obtained from:
        `RankResult.crash`.
    """

    type: str
    message: str
    traceback: str
    exit_code: int = 1
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: with an exit code, or by a signal.

    Obtained from:
        `RankResult.exit`.
    """

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
    its main thread was at the moment of the first failure, innermost frame first; `last` describes
    the last operation of its process groups at that moment, `progress` the last step that it
    reported; `finished` says that its program had come to its end.

    Obtained from:
        `JobResult.ranks`, `JobResult.first_failure` and `LaunchError.report`.
    """

    rank: int
    host: str
    pid: int
    exit: Exit
    ended_by_launcher: bool = False
    crash: Crash | None = None
    stack: tuple[StackFrame, ...] = ()
    last: str = ""
    progress: str = ""
    finished: bool = False

    def is_process_of(self, other: RankResult) -> bool:
        """Return whether both are of one process: a rank that is replaced has had several."""
        return (self.rank, self.host, self.pid) == (other.rank, other.host, other.pid)

    @property
    def how(self) -> str:
        """How the rank failed, in one line."""
        if self.crash is None:
            return f"failed: {self.exit}"
        if self.crash.type == HANG:
            return f"hung: {self.crash.message}"
        return f"raised {self.crash.type}: {self.crash.message}"

    @property
    def status(self) -> int:
        """The exit code that the rank chose, even if it was ended on its way out."""
        if self.crash is not None and (self.ended_by_launcher or self.exit.ok):
            return self.crash.exit_code
        return self.exit.status


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """A rank that failed, with torch's fields.

    `message` is torch's dict if the rank crashed. `timestamp`, in seconds since 1970, is when the
    launcher made this record: after the job ended.
    """

    local_rank: int
    pid: int
    exitcode: int
    message: str | dict[str, Any]
    timestamp: int = field(default_factory=lambda: int(time.time()))
    error_file: str = "<N/A>"

    @classmethod
    def of(cls, result: RankResult, local_rank: int) -> ProcessFailure:
        """Translate what became of a rank."""
        number, crash = result.exit.signal, result.crash
        if crash is not None:
            extra = {"py_callstack": crash.traceback}
            message: Any = {"message": f"{crash.type}: {crash.message}", "extraInfo": extra}
            return cls(local_rank, result.pid, result.status, message)
        if number is None:
            return cls(local_rank, result.pid, result.status, str(result.exit))
        text = f"Signal {number} ({signal_name(number)}) received by PID {result.pid}"
        return cls(local_rank, result.pid, -number, text)

    def signal_name(self) -> str:
        """Return the name of the signal that ended the process, if one did."""
        return signal_name(-self.exitcode) if self.exitcode < 0 else "<N/A>"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What became of the job.

    `exit_code` is what the command `dure run` exits with: 0, the first failure's, or 128 + the
    signal that interrupted the launcher. A job that kept going may have both, a first failure and
    0. `outlived` are the processes, as (pid, command), that the ranks left behind and the launcher
    ended.

    Obtained from:
        `run_job`.

    Example:
        ```python
        if dist.get_rank() == 0:
            Path("fails.py").write_text("raise SystemExit(3)")
            result = launch.run_job(launch.JobSpec(program="fails.py", quiet=True))
            assert not result.ok and result.exit_code == 3
            assert result.first_failure.rank == 0
        ```
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
            failures=self._failures(failure),
            peer=failure.rank,
            elapsed_s=self.elapsed_s,
            seen=seen,
        )

    def _failures(self, first: RankResult) -> dict[int, ProcessFailure]:
        """Return the ranks that failed by themselves, the first one first."""
        failed = [r for r in self.ranks if r.status and (r.crash or not r.ended_by_launcher)]
        before = [first, *(r for r in failed if r.rank != first.rank)]
        return {
            r.rank: ProcessFailure.of(
                r, sum(o.host == r.host and o.rank < r.rank for o in self.ranks)
            )
            for r in before
        }
