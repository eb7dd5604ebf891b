"""MPI as this process has it: found, loaded and started once, when the first group asks for it.

mpi4py brings no MPI of its own: its wheel finds the machine's (Open MPI, MPICH, Intel MPI) when it
is imported. Dure starts MPI; ending it is left to mpi4py, at the process's end.

Threads: all calls into MPI are made under `Library.lock`, so MPI_THREAD_SERIALIZED is enough for
Dure; a program that also calls MPI itself, from another thread, needs MPI_THREAD_MULTIPLE, which
mpi4py asks for by default (`mpi4py.rc`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dure import env
from dure.errors import UsageError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Library", "available", "installed", "launched", "load"]

_PROBE_S = 20.0
_PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Library:
    """MPI, started.

    Attributes:
        MPI: The module `mpi4py.MPI`.
        threads: Whether other threads than the main one may call it.
        lock: Held during every call of ours.
        kept: What MPI may still touch to the end: requests that nobody will finish, with their
            memory, and the communicators of closed groups (see `mpi.progress`).
    """

    MPI: Any
    threads: bool
    lock: threading.RLock = field(default_factory=threading.RLock)
    kept: list[object] = field(default_factory=list[object])

    @property
    def world(self) -> MPI.Intracomm:
        """All processes that were started together."""
        return self.MPI.COMM_WORLD

    def highest_tag(self, comm: MPI.Intracomm) -> int:
        """Return the highest tag of this MPI; 32767 is what every MPI has."""
        return comm.Get_attr(self.MPI.TAG_UB) or 32_767


@functools.cache
def load() -> Library:
    """Import mpi4py, start MPI unless the program has, and return what there is.

    Raises:
        UsageError: mpi4py is not installed, or finds no MPI on this machine.
    """
    if not installed():
        raise _absent(
            "mpi4py is not installed", "Install it: pip install '.[mpi]' in the checkout of Dure."
        )
    import mpi4py  # lazy: an extra

    mpi4py.rc.finalize = mpi4py.rc.finalize is not False  # None: where importing it starts MPI
    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI  # lazy: an extra
    except (ImportError, RuntimeError) as error:
        raise _absent(str(error).splitlines()[0], _NO_LIBRARY) from None
    if not MPI.Is_initialized():
        level = env.text("MPI4PY_RC_THREAD_LEVEL") or mpi4py.rc.thread_level
        _start(MPI, getattr(MPI, f"THREAD_{level.upper()}"))
    if MPI.Is_finalized():
        raise _absent("MPI has been finalized in this process", "Leave that to mpi4py.")
    threads = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
    return Library(MPI=MPI, threads=threads)


def _start(module: Any, level: int) -> None:
    """Start MPI with the interpreter unlocked, which mpi4py would hold.

    MPI waits in there for the other processes, and these may wait for the store, which a thread of
    this process serves.
    """
    library = ctypes.CDLL(module.__file__)  # what it is linked with is found in it
    status: int = library.MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
    if status != module.SUCCESS:
        raise _absent(f"MPI_Init_thread failed with error {status}", _NO_LIBRARY)
    module.COMM_WORLD.Set_errhandler(module.ERRORS_RETURN)  # as mpi4py does where it starts MPI


_NO_LIBRARY = "Install an MPI; on Debian and Ubuntu: apt-get install openmpi-bin libopenmpi-dev."


def _absent(seen: str, fix: str) -> UsageError:
    return UsageError("the mpi backend cannot run here", seen=seen, fix=fix)


def installed() -> bool:
    """Tell whether mpi4py is installed; whether it finds an MPI is another question."""
    return importlib.util.find_spec("mpi4py") is not None


@functools.cache
def available() -> bool:
    """Tell whether mpi4py and an MPI library are here, without starting MPI.

    Cost:
        Where mpi4py is installed, the first call starts a Python to try: some 0.1 s.
    """
    if "mpi4py.MPI" in sys.modules:
        return True
    if not installed():
        return False
    try:
        found = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, check=False, timeout=_PROBE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0


def launched() -> bool:
    """Tell, by the marks they leave, whether an MPI launcher started this process."""
    marks = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
    return any(env.text(mark) is not None for mark in marks)
