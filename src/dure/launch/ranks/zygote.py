"""The launcher's side of the zygote: when to have one, and how to ask it for ranks.

`zygote_for(spec, ...)` starts a zygote (`forking`) if the job gains by it: if it starts two
processes or more, now or by restarts, that import torch. It lives as long as the job may start
ranks. If it cannot be used, one line says why, and ranks start in fresh interpreters.
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
from dure.launch.ranks.imports import names_to_import, variable_set_first
from dure.launch.ranks.limits import memory_note
from dure.launch.spec import JobSpec

__all__ = ["INTERRUPTED", "RankStart", "Zygote", "usable", "zygote_for"]

_FORKING = str(Path(__file__).with_name("forking.py"))
_FRESH = "each rank starts in a fresh interpreter"
INTERRUPTED = "interrupted while it imported"
_IMPORT_S = 300.0  # torch over a slow network file system
_FORK_S = 30.0
_PRINTED_BYTES = 1 << 20  # of what the imports print: the rest is dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What one rank is to be, however it is started.

    `pipes` are its ends for output, errors and reports; `secrets` keep their numbers. `binding` is
    as of `cores.binding_of`. The death of `launcher` ends the rank; 0: of no process.
    """

    spec: JobSpec
    args: tuple[str, ...]
    variables: Mapping[str, str]
    binding: str
    reads_stdin: bool
    pipes: tuple[int, int, int]
    secrets: tuple[int, ...]
    launcher: int


class Zygote:
    """A running zygote.

    Args:
        spec: The job.
        names: What it imports.
        needed: How many of `names`, the first ones, must import without an error.
        environment: What it is started with.

    Attributes:
        say: Gets the line that reports its loss.

    Raises:
        OSError: The process cannot be started.

    Threads: used by one thread.
    """

    def __init__(
        self, spec: JobSpec, names: tuple[str, ...], needed: int, environment: dict[str, str]
    ) -> None:
        self._link, theirs = socket.socketpair()
        self._printed = [b"", b""]  # to the output, to the errors
        self._state: str | None = "waiting"
        self.say: Callable[[str], object] = print
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
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._pipes = [pipe for pipe in (self._process.stdout, self._process.stderr) if pipe]
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
            with contextlib.suppress(OSError):  # this user has many pipes already
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PRINTED_BYTES)
        setup = {
            "first_path": first_path(spec.kind, spec.program),
            "needed": names[:needed],
            "wanted": names[needed:],
        }
        with contextlib.suppress(OSError):  # it has died: `trouble` will say so
            send(self._link, setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def trouble(self, interrupted: int) -> str | None:
        """Wait until it has imported; return why it cannot be used, or None if it can.

        `interrupted` is a descriptor that becomes readable when the user interrupts the job.
        """
        if self._state == "waiting":
            self._state = self._wait(interrupted)
            for at in range(len(self._pipes)):
                self._read_printed(at)
            if self._state is not None:
                self.close()
        return self._state

    def _wait(self, interrupted: int) -> str | None:
        poll, deadline = select.poll(), time.monotonic() + _IMPORT_S
        pipes = {pipe.fileno(): at for at, pipe in enumerate(self._pipes)}
        for fd in (self._link.fileno(), interrupted, *pipes):
            poll.register(fd, select.POLLIN)
        ready: list[int] = []
        while (left_s := deadline - time.monotonic()) > 0:
            ready = [fd for fd, _ in poll.poll(left_s * 1000)]
            for fd in pipes.keys() & set(ready):
                if self._read_printed(pipes[fd]):
                    poll.unregister(fd)
            ready = [fd for fd in ready if fd not in pipes]
            if ready:
                break
        if interrupted in ready:
            return INTERRUPTED
        if not ready:
            return f"the import took longer than {_IMPORT_S:.0f} s"
        try:
            return receive(self._link)[0]["trouble"]
        except (EOFError, OSError):
            return f"the process that imports {self._ended()}"

    def _read_printed(self, at: int) -> bool:
        """Read what a pipe has now, and keep the first part; return whether the pipe has ended."""
        while data := self._pipes[at].read(1 << 16):
            self._printed[at] += data[: _PRINTED_BYTES - len(self._printed[at])]
        return data is not None

    def fork(self, start: RankStart) -> int | None:
        """Start a rank, a child of this process; return its number, or None if it cannot be copied.

        A zygote that has died, or does not answer, is not used again, which is reported once.

        Raises:
            OSError: There is no memory for it, or no process.
        """
        if self._state is not None:
            return None
        for text, fd in zip(self._printed, start.pipes[:2], strict=True):
            if text:  # as if it had imported; as much as fits into the pipe, which is empty
                os.write(fd, text[: fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)])
        stdout, stderr, report = start.pipes
        fds = [0] if start.reads_stdin else []
        fds += [stdout, stderr, *start.secrets]
        order = {
            "kind": start.spec.kind,
            "program": start.spec.program,
            "args": start.args,
            "environment": dict(start.variables),
            "numbers": [*range(0 if start.reads_stdin else 1, 3), *start.secrets],
            "launcher": start.launcher,
        }
        try:
            answer = self._answer(order, (*fds, report))
        except TimeoutError:
            self._give_up(f"did not answer for {_FORK_S:.0f} s")
            return None
        except (EOFError, OSError):
            self._give_up(self._ended())
            return None
        if "error" in answer:
            raise OSError(answer.get("errno", 0), answer["error"])
        return answer["pid"]

    def _answer(self, order: dict[str, Any], fds: tuple[int, ...]) -> dict[str, Any]:
        """Send an order, and return the answer.

        A zygote that is too slow is killed. What it was forking at that time still answers, or ends
        and closes the socket: so no rank appears later beside the one that is started in its place.

        Raises:
            TimeoutError: There was no answer in time, and there is no rank.
        """
        self._link.settimeout(_FORK_S)
        try:
            send(self._link, order, fds)
            return receive(self._link)[0]
        except TimeoutError:
            self._process.kill()
            self._link.settimeout(None)
            try:
                return receive(self._link)[0]
            except (EOFError, OSError):
                raise TimeoutError from None

    def close(self) -> None:
        """End it; ranks that were forked stay."""
        self._link.close()
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes:
            pipe.close()

    def _ended(self) -> str:
        """End it if it has not ended, and return how it ended."""
        self._process.kill()
        code = self._process.wait()
        start = 0 if self._state == "waiting" else len(self._printed[1])
        self._read_printed(1)
        words = self._printed[1][start:].decode(errors="replace").strip().rpartition("\n")[2]
        detail = f" ({words})" if words else ""
        return (f"was killed by signal {-code}" if code < 0 else f"exited with {code}") + detail

    def _give_up(self, how: str) -> None:
        self._state = f"the process that ranks were forked from {how}"
        self.say(f"{_FRESH}: {self._state}")


@contextlib.contextmanager
def zygote_for(
    spec: JobSpec, job: str, threads: int | None, say: Callable[[str], None] = print
) -> Iterator[Zygote | None]:
    """Start a zygote, if the job gains by one, and end it after the block.

    Args:
        spec: The job.
        job: Its name in the environment of its processes.
        threads: OMP_NUM_THREADS of every rank; None: as it is.
        say: Gets warnings, and why a program that uses variables for torch starts afresh.

    Raises:
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
    variable = variable_set_first(spec) if forked and spec.zygote != "always" else ""
    if variable:
        say(f"{_FRESH}: the program uses {variable} before it imports torch")
        forked = False
    note = memory_note(spec, torch="torch" in needed, forked=forked or spec.call is not None)
    if note:
        say(note)
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
