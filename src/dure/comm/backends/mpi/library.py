"""The MPI library of this process: loaded and started once, for the first group that uses it.

mpi4py contains no MPI: its wheel finds that of the machine (Open MPI, MPICH, Intel MPI) when it is
imported. Dure starts MPI; mpi4py ends it when the process ends.

Threads:
    Dure calls MPI only while it holds `Library.lock`, so MPI_THREAD_SERIALIZED is enough; a program
    that also calls MPI itself, from another thread, needs MPI_THREAD_MULTIPLE, which mpi4py
    requests by default (`mpi4py.rc`).
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
        kept: Objects that MPI may use until the process ends: abandoned requests with their
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
    """Import mpi4py, and start MPI unless the program has done it.

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
    """Start MPI with the interpreter unlocked; mpi4py would keep it locked.

    While it starts, MPI waits for the other processes. These may wait for the store, which a thread
    of this process serves.
    """
    library = ctypes.CDLL(module.__file__)  # it is linked with MPI
    status: int = library.MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
    if status != module.SUCCESS:
        raise _absent(f"MPI_Init_thread failed with error {status}", _NO_LIBRARY)
    module.COMM_WORLD.Set_errhandler(module.ERRORS_RETURN)  # as mpi4py does where it starts MPI


_NO_LIBRARY = "Install an MPI; on Debian and Ubuntu: apt-get install openmpi-bin libopenmpi-dev."


def _absent(seen: str, fix: str) -> UsageError:
    return UsageError("the mpi backend cannot run here", seen=seen, fix=fix)


def installed() -> bool:
    """Return whether mpi4py is installed; it need not find an MPI."""
    return importlib.util.find_spec("mpi4py") is not None


@functools.cache
def available() -> bool:
    """Return whether mpi4py and an MPI library are available, without starting MPI.

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
    """Return, by environment variables, whether an MPI launcher started this process."""
    marks = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
    return any(env.text(mark) is not None for mark in marks)
