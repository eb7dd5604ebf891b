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
from typing import Any

from dure import env
from dure.launch.interpreter import interpreter_options
from dure.launch.ranks.child import first_path
from dure.launch.ranks.environment import malloc_variables
from dure.launch.ranks.forking import receive, send
from dure.launch.ranks.imports import names_to_import
from dure.launch.spec import JobSpec

__all__ = ["INTERRUPTED", "ForkOrder", "Zygote", "usable", "zygote_for"]

_FORKING = str(Path(__file__).with_name("forking.py"))
_FRESH = "each rank starts in a fresh interpreter"
INTERRUPTED = "interrupted while it imported"
_IMPORT_S = 300.0  # torch over a slow network file system
_FORK_S = 30.0
_PIPE_BYTES = 1 << 16
_ROOM_BYTES = 1 << 13
"""For what the ranks' variables take more than the zygote's: see `forking._set_environment`."""
_READ_AT_START = (
    "PYTHON",
    "LD_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "MALLOC_",
    "GLIBC_",
)
"""Variables that are read before a program can be asked: a rank that differs in one is no copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """What one rank is to be.

    `fds` are its standard output, errors and the pipe for reports; `inherits` keep their numbers.
    `stdin` is a descriptor, or why there is none. `cpus` are
    those that it is bound to, if it is. `launcher` is whose death ends it, or 0.
    """

    spec: JobSpec
    args: tuple[str, ...]
    cpus: frozenset[int] | None
    environment: Mapping[str, str]
    stdin: int | str
    stdout: int
    stderr: int
    report: int
    inherits: tuple[int, ...]
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
        self._printed = {"stdout": b"", "stderr": b""}
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
        with contextlib.suppress(OSError):  # it has died: `trouble` will say so
            setup = {
                "first_path": first_path(spec.kind, spec.program),
                "needed": names[:needed],
                "wanted": names[needed:],
            }
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

    def fork(self, order: ForkOrder) -> int | None:
        """Start a rank, a child of this process; return its number, or None if it cannot be copied.

        A zygote that has died, or does not answer, is given up, which is said once.

        Raises:
            OSError: There is no memory for it, or no process.
        """
        if self._state is not None or self._differs(order.environment):
            return None
        read, gate = os.pipe()
        try:
            answer = self._ask(order, read)
            if answer is not None and answer.get("pid") is not None:
                self._show_what_was_printed(order)
                os.write(gate, b"g")
        finally:
            os.close(read)
            os.close(gate)
        if answer is None:
            return None
        if "error" in answer:
            raise OSError(answer.get("errno", 0), answer["error"])
        return answer["pid"]

    def _ask(self, order: ForkOrder, gate: int) -> dict[str, Any] | None:
        """Send an order; return the zygote's answer, or None where there is none."""
        passed = isinstance(order.stdin, int)
        fds = [order.stdout, order.stderr, *order.inherits, order.report, gate]
        numbers = [1, 2, *order.inherits]
        if isinstance(order.stdin, int):
            fds, numbers = [order.stdin, *fds], [0, *numbers]
        message = {
            "kind": order.spec.kind,
            "program": order.spec.program,
            "args": order.args,
            "cpus": None if order.cpus is None else sorted(order.cpus),
            "environment": dict(order.environment),
            "stdin": "passed" if passed else order.stdin,
            "numbers": numbers,
            "launcher": order.launcher,
        }
        try:
            self._link.settimeout(_FORK_S)
            send(self._link, message, tuple(fds))
            return receive(self._link)[0]
        except (EOFError, OSError) as error:
            self._give_up(isinstance(error, TimeoutError))
            return None

    def close(self) -> None:
        """End it; ranks that were forked stay."""
        self._link.close()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _wait(self, interrupted: int) -> str | None:
        deadline = time.monotonic() + _IMPORT_S
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        pipes = {self._process.stdout.fileno(): "stdout", self._process.stderr.fileno(): "stderr"}
        poll = select.poll()
        for fd in (self._link.fileno(), interrupted, *pipes):
            poll.register(fd, select.POLLIN)
        while time.monotonic() < deadline:
            ready = [fd for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)]
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
            self._read_last_words()
            return f"the process that imports {self._how_it_ended()}"

    def _read_last_words(self) -> None:
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        self._printed["stderr"] += self._process.stderr.read() or b""

    def _how_it_ended(self) -> str:
        self._process.kill()
        code = self._process.wait()
        words = self._printed["stderr"].decode(errors="replace").strip().rpartition("\n")[2]
        said = f" ({words})" if words else ""
        return (f"was killed by signal {-code}" if code < 0 else f"exited with {code}") + said

    def _give_up(self, silent: bool) -> None:
        """Note, and say, that it forks no more."""
        how = self._how_it_ended()
        if silent:
            how = f"did not answer for {_FORK_S:.0f} s"
        self._state = f"the process that ranks were forked from {how}"
        self.say(f"{_FRESH}: {self._state}")

    def _differs(self, environment: Mapping[str, str]) -> bool:
        """Tell whether a rank needs an interpreter that starts with other variables."""
        return any(
            environment.get(name) != self._environment.get(name)
            for name in environment.keys() | self._environment.keys()
            if name.startswith(_READ_AT_START)
        )

    def _show_what_was_printed(self, order: ForkOrder) -> None:
        """Let the rank print what the imports have printed, as it would have imported."""
        for fd, text in zip((order.stdout, order.stderr), self._printed.values(), strict=True):
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
        OSError: The process cannot be started.
    """
    names, needed = _names(spec)
    if not names:
        yield None
        return
    changes: dict[str, str | None] = {"PYTHONUNBUFFERED": "1", "DURE_LAUNCHER": job}
    if threads is not None:
        changes["OMP_NUM_THREADS"] = str(threads)
    changes |= malloc_variables(spec)
    zygote = Zygote(spec, names, needed, env.child_environment(changes | dict(spec.env)))
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


def _names(spec: JobSpec) -> tuple[tuple[str, ...], int]:
    """Return what a zygote should import, and how many of it must come in; nothing for none."""
    if spec.zygote == "never" or spec.kind == "executable" or spec.numa is not None:
        return (), 0
    several = spec.nproc > 1 or spec.max_restarts > 0 or spec.elastic
    if not several and spec.zygote == "auto":
        return (), 0
    found = names_to_import(spec)
    needed = (*found[:1], *spec.preload)
    if not needed and spec.zygote == "always":
        needed = ("torch",)
    return (*needed, *found[1:]), len(needed)
