"""Run the command `dure run` on small programs, and see that nothing of it remains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DURE = (sys.executable, "-m", "dure.cli")


def living(tag: str) -> list[int]:
    """Return the processes that were started with `tag` in their environment."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if tag.encode() in environment:
            found.append(int(name))
    return found


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
    code: int
    out: str
    err: str
    elapsed_s: float

    def lines(self, rank: int) -> list[str]:
        """What `rank` printed, without its prefix."""
        return unfolded(self.out, rank)


@dataclass
class Launching:
    """One test's jobs: a directory for programs, and a tag in every process's environment.

    `limit_s` is how long a job may take; a busy machine needs many times what a quiet one does.
    """

    directory: Path
    tag: str = field(default_factory=lambda: f"LAUNCH_TEST={uuid.uuid4().hex}")
    limit_s: float = 150.0

    def write(self, text: str, name: str = "prog.py") -> str:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    def start(self, *arguments: str, **options: object) -> subprocess.Popen[str]:
        name, _, value = self.tag.partition("=")
        environment = os.environ | {name: value, "TMPDIR": str(self.directory)}
        environment.pop("OMP_NUM_THREADS", None)
        environment |= options.pop("env", {})  # pyright: ignore
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen(
            [*DURE, "run", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=self.directory,
            env=environment,
            **options,  # pyright: ignore
        )

    def finish(self, process: subprocess.Popen[str], stdin: str | None = None) -> Finished:
        start = time.monotonic()
        try:
            out, err = process.communicate(stdin, timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        elapsed = time.monotonic() - start
        assert self.left() == []
        return Finished(process.returncode, out, err, elapsed)

    def run(self, *arguments: str, **options: object) -> Finished:
        return self.finish(self.start(*arguments, **options))

    def left(self) -> list[int]:
        return living(self.tag)


def launching(directory: Path) -> Iterator[Launching]:
    """Yield a `Launching`; afterwards fail if a process, a file or shared memory was left."""
    shared = set(os.listdir("/dev/shm"))
    job = Launching(directory)
    yield job
    left = job.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    assert list(directory.glob("dure_*")) == []
    assert {x for x in os.listdir("/dev/shm") if x not in shared and "dure" in x} == set()


def wait_for_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """Return once the ranks have printed `count` lines: one that several share counts for each."""
    assert process.stdout is not None
    lines: list[str] = []
    while sum(len(writers(line)) for line in lines) < count:
        line = process.stdout.readline()
        assert line, lines
        lines.append(line)
    return lines
