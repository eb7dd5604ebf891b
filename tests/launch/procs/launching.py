"""Commands of a test (`dure run` and others) on small programs; nothing of them may remain.

A `Launching` tags the environment of all that it starts. So a test finds every process of its jobs,
whoever started it, on this host and in the namespaces of `comm.namespace_hosts`.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

from tests.waiting import PATIENCE_S, until

DURE = (sys.executable, "-m", "dure.cli")


def living(tag: str) -> list[int]:
    """Return the processes that were started with `tag` in their environment."""
    wanted, me = tag.encode(), str(os.getpid())
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and name != me:
            with contextlib.suppress(OSError):
                if wanted in _environment(name):
                    found.append(int(name))
    return found


def being_replaced() -> list[int]:
    """Return the processes of this user that are within `exec`."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (
                    Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
                )
                empty = not Path(f"/proc/{name}/cmdline").read_bytes() and state not in "ZX"
                if empty and parent not in ("0", "2"):  # those are the kernel's own
                    found.append(int(name))
    return found


def described(pids: list[int]) -> list[str]:
    """Say of each process what it is and where in the kernel it waits."""
    lines: list[str] = []
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            wait = Path(f"/proc/{pid}/wchan").read_text()
            lines.append(f"{pid}: {words[:200]}, state {stat[0]}, parent {stat[1]}, in {wait}")
    return lines


def _environment(pid: str) -> bytes:
    """Return what is in a process's `environ`; without `open`, which takes twice as long."""
    file = os.open(f"/proc/{pid}/environ", os.O_RDONLY)
    try:
        parts = iter(lambda: os.read(file, 1 << 16), b"")
        return b"".join(parts)
    finally:
        os.close(file)


_PREFIX = re.compile(r"^\[ *(?P<ranks>[0-9,-]+)\] ?")


def writers(line: str) -> list[int]:
    """Return the ranks that wrote a line, by its prefix."""
    match = _PREFIX.match(line)
    runs = [run.split("-") for run in match["ranks"].split(",")] if match else []
    return [rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1)]


def unfolded(text: str, rank: int) -> list[str]:
    """Return the lines of `rank` without their prefix, those included that it shares."""
    lines = [line for line in text.splitlines() if rank in writers(line)]
    return [_PREFIX.sub("", line, count=1) for line in lines]


@dataclass
class Finished:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    def lines(self, rank: int) -> list[str]:
        """Return what `rank` printed, without its prefix."""
        return unfolded(self.out, rank)


@dataclass
class Launching:
    """One test's commands: a directory for programs, and a tag in every process's environment."""

    directory: Path
    tag: str = field(default_factory=lambda: f"LAUNCH_TEST={uuid.uuid4().hex}")
    started: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    def write(self, text: str, name: str = "prog.py") -> str:
        """Write a program, and return its path."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start `dure run` with these arguments; see `start_any` for the options."""
        return self.start_any(*DURE, "run", *arguments, **options)

    def start_any(
        self,
        *command: str | Path,
        env: dict[str, str] | None = None,
        output: Path | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command.

        Args:
            command: Its words.
            env: More variables.
            output: The file for both of its streams; None: a pipe for each.
            options: As of `subprocess.Popen`.
        """
        environment = os.environ | self.variables
        environment.pop("OMP_NUM_THREADS", None)
        options = {"stdin": DEVNULL, "cwd": self.directory} | options
        with contextlib.ExitStack() as files:
            out: Any = PIPE if output is None else files.enter_context(output.open("w"))
            process = subprocess.Popen(
                command,
                env=environment | (env or {}),
                text=True,
                errors="replace",
                **({"stdout": out, "stderr": out} | options),
            )
        self.started.append(process)
        return process

    @property
    def variables(self) -> dict[str, str]:
        """What all that is started has in its environment."""
        name, _, value = self.tag.partition("=")
        return {name: value, "TMPDIR": str(self.directory)}

    def finish(self, process: subprocess.Popen[str], stdin: str | None = None) -> Finished:
        """Wait for a command's end, after which nothing of any may be left."""
        return self.finish_all(process, stdin=stdin)[0]

    def finish_all(
        self, *processes: subprocess.Popen[str], stdin: str | None = None
    ) -> list[Finished]:
        """Wait for the ends of several, after which nothing of any may be left."""
        finished: list[Finished] = []
        for process in processes:
            out, err = process.communicate(stdin, timeout=PATIENCE_S)
            finished.append(Finished(process.returncode, out or "", err or ""))
        assert self.left() == []
        return finished

    def run(self, *arguments: str | Path, **options: Any) -> Finished:
        """Start `dure run`, and wait for its end."""
        return self.finish(self.start(*arguments, **options))

    def left(self) -> list[int]:
        """Return the processes that live, launchers included."""
        return living(self.tag)

    def wait_until_gone(self) -> None:
        """Wait until no process is left.

        A process has no environment for a moment within `exec`: one that the first look misses
        is either still there at the second, or has its environment again at the third.
        """
        until(
            lambda: not (self.left() or being_replaced() or self.left()),
            lambda: f"the end of {described(self.left())}",
        )

    def kill(self) -> list[int]:
        """Kill what is left, wait for its end, and return what that was."""
        left = self.left()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self.wait_until_gone()
        return left


def launching(directory: Path) -> Iterator[Launching]:
    """Yield a `Launching`; afterwards fail if a process, a file or shared memory was left."""
    shared = set(os.listdir("/dev/shm"))
    job = Launching(directory)
    yield job
    assert job.kill() == []
    assert list(directory.glob("dure_*")) == []
    assert {x for x in os.listdir("/dev/shm") if x not in shared and "dure" in x} == set()


def wait_for_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """Return once the ranks have printed `count` lines: one that several share counts for each."""
    lines: list[str] = []
    while sum(len(writers(line)) for line in lines) < count:
        line = process.stdout.readline()
        assert line, lines
        lines.append(line)
    return lines
