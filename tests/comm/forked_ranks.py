"""Functions in forked ranks that may die: processes that go from call to call, without supervision.

`dure.testing.ProcessPool` ends all its ranks when one fails; here a rank may be killed, stopped or
leave, and the others go on. All ranks of all tests are forked from the one server that the pool
uses, which has imported torch.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import dure
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.request import Request
from dure.comm.backends.shm.backend import ShmBackend
from dure.comm.backends.shm.opening import create
from dure.errors import CommError
from dure.store.base import Store
from dure.store.file import FileStore
from dure.testing.pool import start_server
from tests.comm import calls
from tests.comm.options import options
from tests.waiting import PATIENCE_S

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Slot:
    """One rank's place in a call; the ranks of a call can meet in the file `path`."""

    rank: int
    size: int
    path: str

    @property
    def url(self) -> str:
        """The file, as an init_method."""
        return f"file://{self.path}"

    def options(self, store: Store | None = None) -> BackendOptions:
        store = store or FileStore(self.path, -1)
        return options(self.rank, self.size, store)

    def init(self, backend: str | None = "shm") -> None:
        """Make the default group of the call's ranks."""
        timeout = timedelta(seconds=PATIENCE_S)
        dure.init_process_group(backend, self.url, timeout, self.size, self.rank)


class Ranks:
    """`n` processes that run functions: `start` and `result`, or `run` for both.

    Args:
        n: How many.
        folder: For the files in which they meet.
        fn: Started at once, as `start` does, if given.
        *args: Of `fn`.
        inside: For each rank a process whose namespaces it enters; see `procs.hosts`.
    """

    def __init__(
        self,
        n: int,
        folder: Path,
        fn: Callable[..., object] | None = None,
        *args: object,
        inside: Sequence[int] = (),
    ) -> None:
        self._context = start_server()
        self._folder, self._inside = folder, inside
        self.num_started = self._num_calls = 0
        self.ended_at: dict[int, float] = {}  # of ranks, in the last `run` in which they did
        self._members = [self._start(rank) for rank in range(n)]
        if fn is not None:
            self.start(fn, *args)

    def _start(self, rank: int) -> tuple[BaseProcess, Connection]:
        here, there = self._context.Pipe()
        inside = self._inside[rank] if self._inside else None
        process = self._context.Process(target=_serve, args=(there, inside), daemon=True)
        process.start()
        there.close()
        self.num_started += 1
        return process, here

    @property
    def pids(self) -> list[int]:
        return [process.pid or -1 for process, _ in self._members]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member[0].kill()
        for member in self._members:
            _end(member)

    def start(self, fn: Callable[..., object], *args: object, size: int | None = None) -> None:
        """Begin `fn(slot, *args)` on the first `size` ranks, or on all."""
        self._num_calls += 1
        size = len(self._members) if size is None else size
        path = str(self._folder / f"call{self._num_calls}")
        for rank, (_, pipe) in enumerate(self._members[:size]):
            slot = Slot(rank, size, path)
            pipe.send_bytes(pickle.dumps((fn, slot, args)))

    def result(self, rank: int) -> Any:
        """Return what `rank` returned or raised; None if it died."""
        pipe = self._members[rank][1]
        assert pipe.poll(PATIENCE_S), f"rank {rank} neither answered nor died"
        return _received(pipe)[1]

    def values(self) -> list[Any]:
        """Return what all ranks returned; raise what the first failing one raised."""
        return _checked([self.result(rank) for rank in range(len(self._members))])

    def ended(self, rank: int) -> None:
        """Return when the process of a rank has ended."""
        self._members[rank][0].join(PATIENCE_S)
        assert self._members[rank][0].exitcode is not None, f"rank {rank} has not ended"

    def run(
        self, fn: Callable[..., object], size: int, *args: object, limit_s: float = PATIENCE_S
    ) -> list[Any]:
        """Run `fn(slot, *args)` on the first `size` ranks; replace those that end.

        Returns:
            What each rank returned; None for one that ended. A rank that is stopped is killed when
            the others have answered.

        Raises:
            TimeoutError: A rank did not answer in time.
            Exception: What a rank raised.
        """
        self.start(fn, *args, size=size)
        replies: dict[int, Any] = {}
        try:
            self._collect(replies, size, time.monotonic() + limit_s)
            return _checked([replies[rank] for rank in range(size)])
        except BaseException:
            for rank in range(size):
                self._replace(rank)  # who knows where they are
            raise
        finally:
            (self._folder / f"call{self._num_calls}").unlink(missing_ok=True)

    def _collect(self, replies: dict[int, Any], size: int, deadline: float) -> None:
        while len(replies) < size:
            open_ = {self._members[r][1]: r for r in range(size) if r not in replies}
            ready = wait(list(open_), min(_LOOK_S, max(0.0, deadline - time.monotonic())))
            for pipe in ready:
                rank = open_[pipe]  # pyright: ignore[reportArgumentType]
                lives, replies[rank] = _received(self._members[rank][1])
                if not lives:
                    self.ended_at[rank] = time.monotonic()
                    self._replace(rank)
            stopped = [r for r in open_.values() if is_stopped(self.pids[r])]
            if not ready and stopped and len(stopped) == len(open_):
                for rank in stopped:
                    os.kill(self.pids[rank], signal.SIGKILL)
            elif not ready and time.monotonic() > deadline:
                raise TimeoutError(
                    f"ranks {list(open_.values())} neither answered nor ended; so far {replies}"
                )

    def _replace(self, rank: int) -> None:
        _end(self._members[rank])
        self._members[rank] = self._start(rank)


def _end(member: tuple[BaseProcess, Connection]) -> None:
    process, pipe = member
    process.kill()
    process.join()
    process.close()
    pipe.close()


def _received(pipe: Connection) -> tuple[bool, Any]:
    """Return whether the rank lives, and what it answered."""
    try:
        return True, pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return False, None


def _checked(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def is_stopped(pid: int) -> bool:
    """Tell whether a process has been stopped by a signal."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


# ---- on the ranks --------------------------------------------------------------------------------


def _serve(pipe: Connection, inside: int | None) -> None:
    torch.set_num_threads(1)
    if inside is not None:
        _enter(inside)
    with suppress(EOFError):
        while True:
            fn, slot, args = pickle.loads(pipe.recv_bytes())
            try:
                reply = fn(slot, *args)
            except BaseException as error:
                reply = error
            pipe.send_bytes(pickle.dumps(reply))


def _enter(pid: int) -> None:
    """Go on as a child in the namespaces of process `pid`; this process waits for that child."""
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = ("net", "uts", "pid", "mnt")
    for namespace in [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kinds]:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "a process may not enter these namespaces")
        os.close(namespace)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(0 if status == 0 else 1)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def while_waiting(act: Callable[[], object]) -> threading.Thread:
    """Call `act` on a thread of its own when the calling thread waits: goes on no further.

    Call it where it does no harm if `act` comes too early.
    """
    ident = threading.get_ident()

    def watch() -> None:
        seen = None
        while True:
            frame = sys._current_frames()[ident]
            here = frame.f_code, frame.f_lasti
            del frame
            if here == seen:
                break
            seen = here
            time.sleep(_LOOK_S)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def in_child(body: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> Any:
    """Fork, do `meanwhile` here, and return what `body` then returns in the child.

    A child that hangs is ended.
    """
    here, there = Pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        there.recv()
        there.send(body())
        os._exit(0)
    there.close()
    with here:
        meanwhile()
        here.send(None)
        returned = here.recv()
    assert os.waitpid(child, 0)[1] == 0
    return returned


def caught(call: Callable[[], object]) -> CommError:
    """Return the error of a communication that fails."""
    try:
        call()
    except CommError as error:
        return error
    raise AssertionError("the call succeeded")


def mapped_segments() -> list[str]:
    """List this process's mappings of the engine's memory files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:dure" in line]


class Named:
    """A backend whose collectives can be called by name, with ``async_op`` last."""

    def __init__(self, backend: ShmBackend) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        make = getattr(calls, name, None)
        if make is None:
            return getattr(self.backend, name)

        def call(*args: Any, async_op: bool | None = None) -> Request | None:
            *rest, last = (*args, async_op) if async_op is not None else args
            return self.backend.run(make(*rest), last)

        return call


def join(slot: Slot, store: Store | None = None) -> Named:
    """Join the group."""
    return Named(create(slot.options(store)))
