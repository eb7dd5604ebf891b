"""The launcher's side of the zygote: when to have one, and how to ask it for ranks.

`zygote_for(spec, ...)` starts a zygote (`forking`) if the job gains by it: if it starts two
processes or more, now or by restarts, that import torch. It lives as long as the job may start
ranks. If it cannot be used, one line says why, and ranks start in fresh interpreters.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dure import env
from dure.launch.interpreter import interpreter_options
from dure.launch.ranks.child import first_path
from dure.launch.ranks.environment import early_variables
from dure.launch.ranks.forking import receive, send
from dure.launch.ranks.imports import names_to_import, variable_set_first
from dure.launch.ranks.limits import memory_note
from dure.launch.spec import JobSpec

__all__ = ["RankStart", "Zygote", "zygote_for"]

_FORKING = str(Path(__file__).with_name("forking.py"))
_FRESH = "each rank starts in a fresh interpreter"
_IMPORT_S = 300.0  # torch over a slow network file system


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
    """A running zygote. The output of its imports goes to the launcher's standard error, once.

    Args:
        spec: The job.
        names: The modules that it imports.
        needed: How many of `names`, the first ones, must import without an error.
        environment: Its variables.

    Raises:
        OSError: The process cannot be started.

    Threads:
        Used by one thread.
    """

    def __init__(
        self, spec: JobSpec, names: tuple[str, ...], needed: int, environment: dict[str, str]
    ) -> None:
        self._link, theirs = socket.socketpair()
        self._say: Callable[[str], object] = print
        self._ready = False
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, *interpreter_options(), _FORKING),
                    *(str(theirs.fileno()), str(os.getpid())),
                    *(spec.kind, spec.program, *spec.args),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # what ranks have: streams remember whether they can seek
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        setup = {
            "first_path": first_path(spec.kind, spec.program),
            "needed": names[:needed],
            "wanted": names[needed:],
        }
        assert self._process.stdout is not None
        self._process.stdout.close()
        with contextlib.suppress(OSError):  # it has died: `is_ready` will say so
            send(self._link, setup, (2,))

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready(self, interrupted: int, say: Callable[[str], object]) -> bool:
        """Wait until it has imported; if it cannot be used, say why, end it and return False.

        Args:
            interrupted: A descriptor that becomes readable when the user interrupts the job.
            say: Gets that line now, and later the one that reports its loss.
        """
        self._say = say
        readable = select.select([self._link, interrupted], [], [], _IMPORT_S)[0]
        if interrupted not in readable:
            trouble = f"the import took longer than {_IMPORT_S:.0f} s"
            if readable:
                try:
                    trouble = receive(self._link)[0]["trouble"]
                except (EOFError, OSError):
                    trouble = f"the process that imports {self._ended()}"
            self._ready = trouble is None
            if trouble is not None:
                say(f"{_FRESH}: {trouble}")
        if not self._ready:
            self.close()
        return self._ready

    def fork(self, start: RankStart) -> int | None:
        """Start a rank, a child of this process; return its number, or None if it cannot be copied.

        A zygote that has died is not used again, which is reported once.

        Raises:
            OSError: There is no memory for it, or no process.
        """
        if not self._ready:
            return None
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
            send(self._link, order, (*fds, report))
            answer = receive(self._link)[0]
        except (EOFError, OSError):
            self._ready = False
            self._say(f"{_FRESH}: the process that ranks were forked from {self._ended()}")
            return None
        if "error" in answer:
            raise OSError(answer.get("errno", 0), answer["error"])
        return answer["pid"]

    def close(self) -> None:
        """End it; ranks that were forked stay."""
        self._link.close()
        self._process.kill()
        self._process.wait()

    def _ended(self) -> str:
        """End it if it has not ended, and return how it ended."""
        self._process.kill()
        code = self._process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"


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
    found = names_to_import(spec) if python and several else ()
    needed = (*found[:1], *spec.preload)
    may_fork = python and several and spec.numa is None and spec.call is None
    forked = bool(needed) and may_fork and spec.zygote != "never"
    variable = variable_set_first(spec) if forked and found else ""
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
    environment = env.child_environment(changes | early_variables(spec) | dict(spec.env))
    zygote = Zygote(spec, (*needed, *found[1:]), len(needed), environment)
    try:
        yield zygote
    finally:
        zygote.close()
