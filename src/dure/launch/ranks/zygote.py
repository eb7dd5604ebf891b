"""The launcher's side of the zygote: when to have one, and how to ask it for ranks.

`zygote_for(spec, ...)` starts a zygote (`forking`) if the job gains by it: if it starts
two processes or more, now or by restarts, that import torch. It lives as long as the job may start
ranks. Whatever makes it unfit is said in one line, and ranks start in fresh interpreters, as they
do without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dure import env
from dure.launch.interpreter import interpreter_options
from dure.launch.ranks.child import first_path
from dure.launch.ranks.environment import malloc_variables
from dure.launch.ranks.forking import receive, send
from dure.launch.ranks.imports import names_to_import
from dure.launch.ranks.limits import check_memory
from dure.launch.spec import JobSpec

__all__ = ["INTERRUPTED", "RankStart", "Zygote", "usable", "zygote_for"]

_FORKING = str(Path(__file__).with_name("forking.py"))
_FRESH = "each rank starts in a fresh interpreter"
INTERRUPTED = "interrupted while it imported"
_IMPORT_S = 300.0  # torch over a slow network file system
_FORK_S = 30.0
_PIPE_BYTES = 1 << 16
_ROOM_BYTES = 1 << 13
"""For what the ranks' variables take more than the zygote's: see `forking._set_environment`."""
_READ_AT_START = (
    *("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_"),
)
"""Variables that are read before a program can be asked: a rank that differs in one is no copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What one rank is to be, however it is started.

    `pipes` are its ends for output, errors and reports; `secrets` keep their numbers. `cpus` are
    those that it is bound to, if it is. `launcher` is whose death ends it, or 0.
    """

    spec: JobSpec
    args: tuple[str, ...]
    variables: Mapping[str, str]
    cpus: frozenset[int] | None
    reads_stdin: bool
    pipes: tuple[int, int, int]
    secrets: tuple[int, ...]
    launcher: int


class Zygote:
    """A running zygote.

    Args:
        spec: The job.
        names: What it imports, first what it must, `needed` of them.
        needed: How many of `names` must be imported without an error.
        environment: What it is started with.

    Attributes:
        say: Who is told if it is lost.

    Raises:
        OSError: The process cannot be started.

    Threads: used by one thread.
    """

    def __init__(
        self, spec: JobSpec, names: tuple[str, ...], needed: int, environment: dict[str, str]
    ) -> None:
        self._environment = environment | {"DURE_ROOM": "x" * _ROOM_BYTES}
        self._link, theirs = socket.socketpair()
        self._printed = [b"", b""]  # to the output, to the errors
        self._state: str | None = "waiting"
        self.say: Callable[[str], object] = bool
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, *interpreter_options(), _FORKING),
                    *(str(theirs.fileno()), str(os.getpid())),
                    *(spec.kind, spec.program, *spec.args),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=self._environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        setup = {
            "first_path": first_path(spec.kind, spec.program),
            "needed": names[:needed],
            "wanted": names[needed:],
        }
        with contextlib.suppress(OSError):  # it has died: `trouble` will say so
            send(self._link, setup)

    @property
    def pid(self) -> int:
        """The process number."""
        return self._process.pid

    def trouble(self, interrupted: int) -> str | None:
        """Wait until it has imported; return why it cannot be used, or None if it can.

        Args:
            interrupted: A descriptor that becomes readable when the user has had enough.
        """
        if self._state == "waiting":
            self._state = self._wait(interrupted)
            if self._state is not None:
                self.close()
        return self._state

    def fork(self, start: RankStart) -> int | None:
        """Start a rank, a child of this process; return its number, or None if it cannot be copied.

        A zygote that has died, or does not answer, is given up, which is said once.

        Raises:
            OSError: There is no memory for it, or no process.
        """
        if self._state is not None or self._differs(start.variables):
            return None
        read, known = os.pipe()
        try:
            answer = self._ask(start, read)
            if answer.get("pid") is not None:
                self._show_what_was_printed(start)
                os.write(known, b"k")
        finally:
            os.close(read)
            os.close(known)
        if "error" in answer:
            raise OSError(answer.get("errno", 0), answer["error"])
        return answer.get("pid")

    def _ask(self, start: RankStart, ready: int) -> dict[str, Any]:
        """Order a rank; return the zygote's answer, which is empty where none came."""
        stdout, stderr, report = start.pipes
        secrets = start.secrets
        fds, numbers = [stdout, stderr, *secrets, report, ready], [1, 2, *secrets]
        stdin = "null"
        if start.reads_stdin:
            stdin = "closed" if sys.__stdin__ is None else "passed"
        if stdin == "passed":
            fds, numbers = [0, *fds], [0, *numbers]
        order = {
            "kind": start.spec.kind,
            "program": start.spec.program,
            "args": start.args,
            "cpus": None if start.cpus is None else sorted(start.cpus),
            "environment": dict(start.variables),
            "stdin": stdin,
            "numbers": numbers,
            "launcher": start.launcher,
        }
        try:
            self._link.settimeout(_FORK_S)
            send(self._link, order, tuple(fds))
            return receive(self._link)[0]
        except TimeoutError:
            self._ended()
            self._give_up(f"did not answer for {_FORK_S:.0f} s")
        except (EOFError, OSError):
            self._give_up(self._ended())
        return {}

    def close(self) -> None:
        """End it; ranks that were forked stay."""
        self._link.close()
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes:
            pipe.close()

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        return self._process.stdout, self._process.stderr

    def _wait(self, interrupted: int) -> str | None:
        """Wait for what comes of the imports, and keep what they print."""
        deadline = time.monotonic() + _IMPORT_S
        pipes = {pipe.fileno(): stream for stream, pipe in enumerate(self._pipes)}
        poll = select.poll()
        for fd in (self._link.fileno(), interrupted, *pipes):
            poll.register(fd, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = [fd for fd, _ in poll.poll(left * 1000)]
            for fd in pipes.keys() & ready:
                data = os.read(fd, _PIPE_BYTES)
                self._printed[pipes[fd]] += data
                if not data:
                    poll.unregister(fd)
            if interrupted in ready:
                return INTERRUPTED
            if self._link.fileno() in ready:
                return self._outcome()
        return f"the import took longer than {_IMPORT_S:.0f} s"

    def _outcome(self) -> str | None:
        try:
            return receive(self._link)[0]["trouble"]
        except (EOFError, OSError):
            return f"the process that imports {self._ended()}"

    def _ended(self) -> str:
        """End it if it has not ended, and say how it did."""
        self._process.kill()
        code = self._process.wait()
        os.set_blocking(self._pipes[1].fileno(), False)
        self._printed[1] += self._pipes[1].read() or b""
        words = self._printed[1].decode(errors="replace").strip().rpartition("\n")[2]
        said = f" ({words})" if words else ""
        return (f"was killed by signal {-code}" if code < 0 else f"exited with {code}") + said

    def _give_up(self, how: str) -> None:
        """Note, and say, that it forks no more."""
        self._state = f"the process that ranks were forked from {how}"
        self.say(f"{_FRESH}: {self._state}")

    def _differs(self, environment: Mapping[str, str]) -> bool:
        """Tell whether a rank needs an interpreter that starts with other variables."""
        return any(
            environment.get(name) != self._environment.get(name)
            for name in environment.keys() | self._environment.keys()
            if name.startswith(_READ_AT_START)
        )

    def _show_what_was_printed(self, start: RankStart) -> None:
        """Let the rank print what the imports have printed, as it would have imported."""
        for text, fd in zip(self._printed, start.pipes[:2], strict=True):
            if text:  # as much as fits into the pipe, which is empty, and small for who has many
                os.write(fd, text[: fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)])


@contextlib.contextmanager
def zygote_for(spec: JobSpec, job: str, threads: int | None) -> Iterator[Zygote | None]:
    """Start a zygote, if the job gains by one, and end it at last.

    Args:
        spec: The job.
        job: Its name in the environment of its processes.
        threads: OMP_NUM_THREADS of every rank, or None to leave it as it is.

    Raises:
        UsageError: This host has no memory for so many ranks.
        OSError: The process cannot be started.
    """
    several = spec.nproc > 1 or spec.max_restarts > 0 or spec.elastic
    python = spec.kind != "executable"
    found = names_to_import(spec) if python and (several or spec.zygote == "always") else ()
    needed = (*found[:1], *spec.preload)
    if not needed and spec.zygote == "always":
        needed = ("torch",)
    wanted = python and spec.zygote != "never" and spec.numa is None and spec.call is None
    forked = bool(needed) and wanted and (several or spec.zygote == "always")
    check_memory(spec, torch="torch" in needed, forked=forked or spec.call is not None)
    if not forked:
        yield None
        return
    changes: dict[str, str | None] = {"PYTHONUNBUFFERED": "1", "DURE_LAUNCHER": job}
    if threads is not None:
        changes["OMP_NUM_THREADS"] = str(threads)
    environment = env.child_environment(changes | malloc_variables(spec) | dict(spec.env))
    zygote = Zygote(spec, (*needed, *found[1:]), len(needed), environment)
    try:
        yield zygote
    finally:
        zygote.close()


def usable(zygote: Zygote | None, interrupted: int, say: Callable[[str], None]) -> Zygote | None:
    """Wait until the zygote is ready, and return it; say why and return None if it is unfit."""
    trouble = None if zygote is None else zygote.trouble(interrupted)
    if trouble is None:
        if zygote is not None:
            zygote.say = say
        return zygote
    if trouble != INTERRUPTED:  # then none is started
        say(f"{_FRESH}: {trouble}")
    return None
