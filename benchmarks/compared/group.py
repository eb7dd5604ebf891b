"""A contestant's ranks: started, told what to do, and ended with everything they started.

Each group is a job of `dure run`, so that no process of it outlives the benchmark, whatever ends
either of them; a group of MPI is a job of one program, `mpirun`. The ranks find the controller by a
socket in Linux's abstract namespace, which leaves nothing on disk; processes of other users are
turned away, for what comes over it is unpickled. Ranks that have nothing to do wait in a read, so
that of many groups only the one that was last told to do something uses the processor.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any  # Any: what a command takes and answers

from dure import env
from dure.cli.machine import QUIET_VARIABLES
from dure.errors import LaunchError, UsageError

_RANK = str(Path(__file__).with_name("rank.py"))
_START_LIMIT_S = 120.0
_ANSWER_LIMIT_S = 120.0
_END_LIMIT_S = 10.0
_POLL_S = 0.1
_PEER = struct.Struct("3i")
_MPI_VARIABLES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "NUMPY_MADVISE_HUGEPAGE": "0",
}
"""By default Open MPI refuses root and more ranks than cores, and binds each rank to one. From
4 MiB on, numpy asks for huge pages, which the kernel copies faster, and torch does not: then memory
would be compared and not libraries."""


class GroupFailed(LaunchError):
    """A contestant could not go on; its processes are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """How the ranks of a group are started.

    Attributes:
        role: The words after the address on the command line of `rank.py`.
        python: The interpreter of ranks of MPI.
        mpirun: The program that starts the ranks; None: `dure run`.
        arena: Whether its tensors come from `shared_empty`.
        program: What `dure run` starts as a rank: it calls `serve` of rank.py.
    """

    role: tuple[str, ...]
    python: str = sys.executable
    mpirun: str | None = None
    arena: bool = False
    program: tuple[str, ...] = (_RANK,)

    def command(self, ranks: int, address: str) -> list[str]:
        run = [sys.executable, "-m", "dure.cli", "run"]
        if self.mpirun is None:
            program = ["--nproc", str(ranks), *self.program]
        else:
            program = ["--no-python", self.mpirun, "-n", str(ranks), self.python, _RANK]
        return [*run, *program, address, *self.role]

    def environment(self) -> dict[str, str]:
        changes: dict[str, str | None] = dict(QUIET_VARIABLES)
        if self.mpirun is not None:
            path = os.pathsep.join([os.path.dirname(self.mpirun), env.text("PATH", "") or ""])
            changes |= {**_MPI_VARIABLES, "PATH": path}
        return env.child_environment(changes)


def ours(backend: str, *, arena: bool) -> Contestant:
    mpirun = _mpirun(sys.executable) if backend == "mpi" else None
    return Contestant(role=("dure", backend), mpirun=mpirun, arena=arena)


def find_rival(name: str, backend: str) -> Contestant:
    """Return "gloo", "mpi", "mpi@PYTHON", or "arena": Dure on `backend`, with `shared_empty`.

    Raises:
        UsageError: It is not installed; says what to install.
    """
    if name == "arena":
        return ours(backend, arena=True)
    if name == "gloo":
        return Contestant(role=("torch", "gloo"))
    python = name.partition("@")[2] or sys.executable
    if shutil.which(python) is None:
        raise UsageError("no such Python", seen=python, fix="Give mpi@/path/to/bin/python.")
    return Contestant(role=("mpi",), python=python, mpirun=_mpirun(python))


def _mpirun(python: str) -> str:
    """Return what starts ranks of MPI with an interpreter that has mpi4py and numpy."""
    beside = shutil.which("mpirun", path=os.path.dirname(python))
    found = beside or shutil.which("mpirun")
    if found is None:
        raise UsageError(
            "there is no mpirun",
            fix="Install an MPI (Debian: openmpi-bin), or name a Python that has one beside it: "
            "mpi@/path/to/bin/python.",
        )
    needs = [python, "-c", "import mpi4py, numpy"]
    if subprocess.run(needs, check=False, capture_output=True).returncode:
        raise UsageError(
            "mpi needs mpi4py and numpy",
            seen=f"{python} has not both",
            fix=f"Install them: {python} -m pip install mpi4py numpy",
        )
    return found


class Group:
    """The running ranks of a contestant. Use it as a context manager, from one thread.

    Attributes:
        label: What the ranks call themselves.
        version: Of what they stand on.
        copies: How Dure's ranks copy on this machine, and its line transfer.
    """

    def __init__(self, contestant: Contestant, ranks: int) -> None:
        self.contestant, self.ranks = contestant, ranks
        self.label = self.version = self.copies = ""
        self._connections: list[Connection] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Group:
        """Start the ranks; `accept_ranks` waits for them."""
        address = f"dure-bench-{uuid.uuid4().hex}"
        with self._stack as stack:
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind("\0" + address)
            self._listener.listen(self.ranks)
            self._listener.settimeout(_POLL_S)
            self._output = stack.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                self.contestant.command(self.ranks, address),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=self.contestant.environment(),
                start_new_session=True,  # Ctrl-C reaches the controller, which ends the groups
            )
            self._stack = stack.pop_all()  # closed by __exit__
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the ranks go, or end them if they do not."""
        self._end(politely=kind is None)
        self._stack.close()

    @property
    def alive(self) -> bool:
        """Whether the ranks still take commands."""
        return bool(self._connections)

    def accept_ranks(self) -> None:
        """Wait until every rank has come.

        Raises:
            GroupFailed: The job ended, or a rank did not come within two minutes.
        """
        deadline = time.monotonic() + _START_LIMIT_S
        came: dict[int, Connection] = {}
        while len(came) < self.ranks:
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    raise self._failed("its processes ended while they started") from None
                if time.monotonic() > deadline:
                    raise self._failed(f"{self.ranks - len(came)} ranks did not come") from None
                continue
            peer = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            if _PEER.unpack(peer)[1] != os.getuid():
                accepted.close()
                continue
            accepted.settimeout(None)
            rank = Connection(accepted.detach())
            hello = rank.recv()
            came[hello["rank"]] = rank
            self.label = hello["label"] + (" arena" if self.contestant.arena else "")
            self.version, self.copies = hello["version"], hello["copies"]
        self._connections = [came[rank] for rank in range(self.ranks)]

    def call(self, command: str, **arguments: object) -> list[dict[str, Any]]:
        """Have every rank carry out a command; return their answers, by rank.

        Raises:
            GroupFailed: A rank failed, ended, or did not answer within two minutes. All are ended.
        """
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        try:
            for rank in self._connections:
                rank.send({"command": command, **arguments})
            waited = {rank: number for number, rank in enumerate(self._connections)}
            while waited:  # whoever answers: a rank that raises may leave the others waiting for it
                ready = wait(list(waited), max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = ", ".join(map(str, waited.values()))
                    raise self._failed(
                        f"rank {late}: no answer in {_ANSWER_LIMIT_S:.0f} s", command
                    )
                for rank in ready:
                    assert isinstance(rank, Connection)
                    number = waited.pop(rank)
                    answers[number] = answer = rank.recv()
                    if "error" in answer:
                        raise self._failed(f"rank {number}: {answer['error']}", command)
        except (OSError, EOFError) as error:
            raise self._failed(str(error) or "a rank ended", command) from error
        return [answers[number] for number in sorted(answers)]

    def _failed(self, what: str, command: str = "") -> GroupFailed:
        """End the ranks; return the error that says why."""
        self._end(politely=False)
        name = self.label or " ".join(self.contestant.role)
        return GroupFailed(
            f"{name} failed" + (f" in {command}" if command else " to start"),
            seen="; ".join([what, *self._last_words()]),
        )

    def _last_words(self) -> list[str]:
        """Return the last lines that the first rank to fail wrote, or the job about it."""
        self._output.seek(0)
        words: list[str] = []
        for line in self._output.read().decode(errors="replace").splitlines():
            text = line.strip().removeprefix("[dure]").strip(" |")
            if text.startswith("where the others were"):
                break
            words += [text] if text else []
        return words[-1:] if words and "Error" in words[-1] else words[-2:]

    def _end(self, *, politely: bool) -> None:
        """Wait for the job's end, after asking for it unless `politely`; kill it if need be."""
        for rank in self._connections:
            rank.close()
        self._connections = []
        for number in (*((0,) if politely else ()), signal.SIGTERM, signal.SIGKILL):
            if number:
                self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_LIMIT_S)
                return
