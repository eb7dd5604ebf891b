"""A contestant's ranks: started, told what to do, and ended with everything they started.

Each group is a job of `dure run`, so that no process of it outlives the benchmark, whatever ends
either of them; a group of MPI is a job of one program, `mpirun`. The ranks find the controller by a
socket in Linux's abstract namespace, which leaves nothing on disk; processes of other users are
turned away. Ranks that have nothing to do wait in a read, so that of many groups only the one that
was last told to do something uses the processor.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any  # Any: what a command takes and answers

from dure import env
from dure.errors import LaunchError, UsageError

__all__ = ["Contestant", "Group", "GroupFailed", "find_rival", "ours"]

_RANK = str(Path(__file__).with_name("rank.py"))
_START_LIMIT_S = 120.0
_ANSWER_LIMIT_S = 120.0
_END_LIMIT_S = 10.0
_POLL_S = 0.1
_PEER = struct.Struct("3i")
_QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# Open MPI refuses root and more ranks than cores, and binds each to one, unless it is told.
_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


class GroupFailed(LaunchError):
    """A contestant could not go on; its processes are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """How the ranks of a group are started.

    Attributes:
        name: What the user called it.
        role: The words after the address on the command line of `rank.py`.
        python: The interpreter.
        mpirun: The program that starts the ranks; None: `dure run`.
        arena: Whether its tensors come from `shared_empty`.
        program: What `dure run` starts as a rank: it calls `serve` of rank.py.
    """

    name: str
    role: tuple[str, ...]
    python: str = sys.executable
    mpirun: str | None = None
    arena: bool = False
    program: tuple[str, ...] = ("-m", "dure.cli.bench.rank")

    def command(self, ranks: int, address: str) -> list[str]:
        """Return the command line that starts so many ranks."""
        run = [sys.executable, "-m", "dure.cli", "run"]
        if self.mpirun is None:
            program = ["--nproc", str(ranks), *self.program]
        else:
            program = ["--no-python", self.mpirun, "-n", str(ranks), self.python, _RANK]
        return [*run, *program, address, *self.role]

    def environment(self) -> dict[str, str]:
        """Return what the processes find in their environment."""
        changes: dict[str, str | None] = dict(_QUIET)
        if self.mpirun is not None:
            folder = os.path.dirname(self.mpirun)
            changes |= {**_MPI, "PATH": os.pathsep.join([folder, env.text("PATH", "") or ""])}
        return env.child_environment(changes)


def ours(backend: str, *, arena: bool) -> Contestant:
    """Return Dure on `backend`."""
    mpirun = None
    if backend == "mpi":
        mpirun = _mpirun(sys.executable)
        _check_mpi4py(sys.executable)
    return Contestant(name="dure", role=("dure", backend), mpirun=mpirun, arena=arena)


def find_rival(name: str, backend: str) -> Contestant:
    """Return the rival that the user calls "arena", "gloo", "mpi" or "mpi@PYTHON".

    Args:
        name: The rival; "arena" is Dure itself, on tensors of `shared_empty`.
        backend: Dure's.

    Raises:
        UsageError: It is not installed; says what to install.
    """
    if name == "arena":
        return ours(backend, arena=True)
    if name == "gloo":
        return Contestant(name=name, role=("torch", "gloo"))
    python = name.partition("@")[2] or sys.executable
    if shutil.which(python) is None:
        raise UsageError("no such Python", seen=python, fix="Give mpi@/path/to/bin/python.")
    _check_mpi4py(python)
    return Contestant(name=name, role=("mpi",), python=python, mpirun=_mpirun(python))


def _mpirun(python: str) -> str:
    """Return the mpirun beside a Python, or the one on PATH."""
    found = shutil.which("mpirun", path=os.path.dirname(python)) or shutil.which("mpirun")
    if found is None:
        raise UsageError(
            "there is no mpirun",
            fix="Install an MPI (Debian: openmpi-bin), or name a Python that has one beside it: "
            "mpi@/path/to/bin/python.",
        )
    return found


def _check_mpi4py(python: str) -> None:
    test = [python, "-c", "import importlib.util as u; exit(not all(map(u.find_spec, "]
    test[-1] += "('mpi4py', 'numpy'))))"
    if subprocess.run(test, check=False, capture_output=True).returncode:
        raise UsageError(
            "mpi needs mpi4py and numpy",
            seen=f"{python} has not both",
            fix=f"Install them: {python} -m pip install mpi4py numpy",
        )


@dataclass(slots=True)
class Group:
    """The running ranks of a contestant. Use it as a context manager, from one thread.

    Attributes:
        contestant: How they were started.
        ranks: How many they are.
        label: What the ranks call themselves.
        version: Of what they stand on.
        copies: How Dure's ranks copy on this machine, and its line transfer.
    """

    contestant: Contestant
    ranks: int
    label: str = ""
    version: str = ""
    copies: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _output: IO[bytes] | None = None
    _listener: socket.socket | None = None
    _sockets: list[socket.socket] = field(default_factory=list[socket.socket])

    def __enter__(self) -> Group:
        """Start the ranks; `meet` waits for them."""
        address = f"dure-bench-{uuid.uuid4().hex}"
        with contextlib.ExitStack() as stack:
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind("\0" + address)
            self._listener.listen(self.ranks)
            self._listener.settimeout(_POLL_S)
            self._output = stack.enter_context(tempfile.TemporaryFile())
            self._start(address)
            stack.pop_all()  # closed by __exit__
        return self

    def _start(self, address: str) -> None:
        self._process = subprocess.Popen(
            self.contestant.command(self.ranks, address),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=self.contestant.environment(),
            start_new_session=True,  # Ctrl-C reaches the controller alone, which ends the groups
        )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the ranks go, or end them if they do not."""
        for connection in self._sockets:
            connection.close()
        self._end(politely=kind is None)
        for resource in (self._listener, self._output):
            if resource is not None:
                resource.close()

    @property
    def alive(self) -> bool:
        """Whether the ranks still take commands."""
        return bool(self._sockets)

    def meet(self) -> None:
        """Wait until every rank has come.

        Raises:
            GroupFailed: The job ended, or a rank did not come within two minutes.
        """
        assert self._listener is not None
        assert self._process is not None
        deadline = time.monotonic() + _START_LIMIT_S
        came: dict[int, socket.socket] = {}
        while len(came) < self.ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    raise self._failed("its processes ended while they started") from None
                if time.monotonic() > deadline:
                    raise self._failed(f"{self.ranks - len(came)} ranks did not come") from None
                continue
            if _user_of(connection) != os.getuid():
                connection.close()
                continue
            connection.settimeout(_ANSWER_LIMIT_S)
            hello = json.loads(_read_line(connection))
            came[hello["rank"]] = connection
            self.label = hello["label"] + (" arena" if self.contestant.arena else "")
            self.version, self.copies = hello["version"], hello["copies"]
        self._sockets = [came[rank] for rank in range(self.ranks)]

    def call(self, command: str, **arguments: object) -> list[dict[str, Any]]:
        """Have every rank carry out a command; return their answers, by rank.

        Raises:
            GroupFailed: A rank failed, ended, or did not answer within two minutes. All are ended.
        """
        line = json.dumps({"command": command, **arguments}).encode() + b"\n"
        answers: dict[int, dict[str, Any]] = {}
        try:
            for connection in self._sockets:
                connection.sendall(line)
            with selectors.DefaultSelector() as waiting:
                for rank, connection in enumerate(self._sockets):
                    waiting.register(connection, selectors.EVENT_READ, rank)
                deadline = time.monotonic() + _ANSWER_LIMIT_S
                while len(answers) < self.ranks:
                    ready = waiting.select(max(0.0, deadline - time.monotonic()))
                    if not ready:
                        raise self._failed(f"no answer in {_ANSWER_LIMIT_S:.0f} s", command)
                    for key, _ in ready:
                        connection = self._sockets[key.data]
                        answers[key.data] = answer = json.loads(_read_line(connection))
                        waiting.unregister(connection)
                        if "error" in answer:
                            raise self._failed(f"rank {key.data}: {answer['error']}", command)
        except (OSError, EOFError, json.JSONDecodeError) as error:
            raise self._failed(str(error) or "a rank ended", command) from error
        return [answers[rank] for rank in range(self.ranks)]

    def _failed(self, what: str, command: str = "") -> GroupFailed:
        """End the ranks; return the error that says why."""
        for connection in self._sockets:
            connection.close()
        self._sockets = []
        self._end(politely=False)
        name = self.label or " ".join(self.contestant.role)
        return GroupFailed(
            f"{name} failed" + (f" in {command}" if command else " to start"),
            seen="; ".join([what, *self._last_words()]),
        )

    def _last_words(self) -> list[str]:
        """Return the last lines that the first rank to fail wrote, or the job about it."""
        if self._output is None or self._output.closed:
            return []
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
        process = self._process
        if process is None:
            return
        for number in (*((0,) if politely else ()), signal.SIGTERM, signal.SIGKILL):
            if number:
                process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_LIMIT_S)
                return


def _user_of(connection: socket.socket) -> int:
    """Return the user whose process is at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return _PEER.unpack(raw)[1]


def _read_line(connection: socket.socket) -> bytes:
    """Read one line; the other side sends no second before it is asked again."""
    line = b""
    while not line.endswith(b"\n"):
        more = connection.recv(65536)
        if not more:
            raise EOFError("a rank ended")
        line += more
    return line
