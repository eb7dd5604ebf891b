"""A pool of processes that run one function after another as the ranks of a group.

Starting a process and importing torch takes much longer than the collective under test. So the
processes are forked from a server that has imported torch, join one group, and wait for functions:
`pool.run(fn, *args)` runs `fn(rank, *args)` on every rank and collects the results. Functions of
modules are sent by name, lambdas and closures by value (cloudpickle, as in `dure.spawn`).

A failure breaks the pool, because the state of the ranks is unknown: all processes are ended, and
later calls raise. Each call has a timeout, after which the stacks of the missing ranks are shown;
faulthandler writes them on the rank itself, so even native code cannot prevent it.

Threads:
    A pool may only be used by the thread that made it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import torch

import dure
from dure import env
from dure.comm.world import current_world
from dure.errors import CommError, CommTimeout, LaunchError, UsageError
from dure.testing.ranks import default_timeout_s

__all__ = ["ProcessPool", "start_server"]

T = TypeVar("T")

# The first optimizer of a process imports torch._dynamo, which takes more than a second.
_PRELOAD = [
    *("dure.testing.pool", "dure.comm.init", "dure.comm.collectives", "dure.comm.objects"),
    *("dure.comm.point_to_point", "dure.comm.shrinking", "dure.comm.backends.shm.backend"),
    "torch._dynamo",
]
_CLOSE_S = 10.0
_GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """A rank's reply: a value, or an error with its traceback as text."""

    value: object = None
    error: BaseException | None = None
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankOptions:
    """The options of a rank, for joining the group."""

    rank: int
    size: int
    backend: str | None
    folder: str
    timeout_s: float
    host: str | None
    eager_bytes: int | None


def start_server() -> ForkServerContext:
    """Start the server from which ranks are forked, unless it runs; it ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()
    return context


class ProcessPool:
    """Processes that form one group, until the end of a `with` block.

    Args:
        n: Number of ranks.
        backend: The default group's backend; None for Dure's choice.
        timeout: Seconds that one call may take, unless the call has its own timeout; also the
            group's timeout. None: the environment variable DURE_TEST_TIMEOUT, or 30.
        hosts: The name of the host that each rank pretends to be on; None for this host.
        eager_bytes: Larger sends wait until they are received; with 0 all sends do. A program that
            only works because sends are buffered then raises `CommTimeout`, which says which rank
            waits for which. Only on the shm backend; None for the backend's default.

    Raises:
        LaunchError: A rank could not join.
        UsageError: `eager_bytes` is negative, or the backend does not support it.

    Cost:
        One forked process per rank; torch is imported once, by the server.

    Example:
        ```python
        from dure.testing import ProcessPool

        def total(rank: int) -> float:
            x = torch.tensor([1.0 + rank])
            dist.all_reduce(x)
            return x.item()

        if __name__ == "__main__":
            with ProcessPool(2) as pool:
                assert pool.run(total) == [3.0, 3.0]
        ```
    """

    def __init__(
        self,
        n: int,
        backend: str | None = None,
        timeout: float | None = None,
        hosts: Sequence[str] | None = None,
        eager_bytes: int | None = None,
    ) -> None:
        self._hosts, self._eager_bytes = hosts, eager_bytes
        if eager_bytes is not None and (backend not in (None, "shm") or hosts or eager_bytes < 0):
            raise UsageError(
                "eager_bytes must not be negative, and is for the shm backend on one host",
                op="ProcessPool",
                seen=f"eager_bytes={eager_bytes}, backend={backend!r}, hosts={hosts!r}",
            )
        self.size, self.backend = n, backend
        self.timeout = default_timeout_s() if timeout is None else timeout
        self._broken = ""
        self._folder = tempfile.TemporaryDirectory(prefix="dure-pool-")
        context = start_server()
        self._pipes: list[connection.Connection] = []
        self._processes: list[BaseProcess] = []
        try:
            for rank in range(n):
                self._start(context, rank)
            self._collect(self.timeout)
        except BaseException:
            self._end(force=True)
            raise

    def _start(self, context: ForkServerContext, rank: int) -> None:
        options = _RankOptions(
            rank=rank,
            size=self.size,
            backend=self.backend,
            folder=self._folder.name,
            timeout_s=self.timeout,
            host=None if self._hosts is None else self._hosts[rank],
            eager_bytes=self._eager_bytes,
        )
        ours, theirs = context.Pipe()
        self._pipes.append(ours)
        with theirs:
            process = context.Process(target=_serve, args=(options, theirs), daemon=True)
            process.start()
        self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [p.pid or -1 for p in self._processes]

    @property
    def broken(self) -> bool:
        """Whether a call has failed, so that the pool cannot be used any more."""
        return bool(self._broken)

    def __enter__(self) -> ProcessPool:
        """Return the pool."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the pool."""
        self.close()

    def run(self, fn: Callable[..., T], *args: object, timeout: float | None = None) -> list[T]:
        """Run `fn(rank, *args)` on every rank.

        Args:
            fn: The function. Lambdas and nested functions are sent by value, with the variables
                that they use; other functions must be importable by name.
            *args: Arguments, pickled the same way; every rank gets its own copy.
            timeout: Seconds that the call may take; None for the pool's timeout.

        Returns:
            The results in rank order.

        Raises:
            Exception: The first error of any rank, with its remote traceback as a note.
            LaunchError: A rank's process ended, or an earlier call has failed.
            CommTimeout: Ranks did not finish in time; `missing` has them, notes have their stacks.
        """
        if self._broken:
            raise LaunchError("the process pool has failed before", seen=self._broken)
        limit = self.timeout if timeout is None else timeout
        message = cloudpickle.dumps((fn, args, limit))
        for pipe in self._pipes:
            with suppress(OSError):  # the rank has ended: reported by `_reply_of`
                pipe.send_bytes(message)
        try:
            return self._collect(limit)  # pyright: ignore[reportReturnType]
        except BaseException as e:
            self._broken = f"{type(e).__name__}: {e}"
            self._end(force=True)
            raise

    def close(self) -> None:
        """End all processes; the end of the `with` block calls it.

        Raises:
            LaunchError: A rank did not exit within 10 s, or has a nonzero exit code.
        """
        if not self._processes:
            return
        codes = self._end(force=False)
        if any(codes) and not self._broken:
            raise LaunchError("ranks of a process pool failed to exit", seen=f"exit codes {codes}")

    def _collect(self, timeout_s: float) -> list[object]:
        """Wait for a reply from every rank; raise the first error."""
        values: dict[int, object] = {}
        first_error: BaseException | None = None
        deadline = time.monotonic() + timeout_s + _GRACE_S  # ranks dump their stacks at timeout_s
        while len(values) < self.size:
            waiting = [p for r, p in enumerate(self._pipes) if r not in values]
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise first_error or self._timed_out(values, timeout_s)
            for pipe in ready:
                rank = self._pipes.index(pipe)  # pyright: ignore[reportArgumentType]
                reply = self._reply_of(rank)
                values[rank] = reply.value
                error = reply.error
                # What other ranks raise about one that died can come before its death is seen.
                is_cause = isinstance(error, LaunchError) and isinstance(first_error, CommError)
                if error is not None and (first_error is None or is_cause):
                    first_error = error
                    first_error.add_note(f"on rank {rank} of {self.size}:\n{reply.trace}")
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if first_error is not None:
            raise first_error
        return [values[r] for r in range(self.size)]

    def _reply_of(self, rank: int) -> _Reply:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(_GRACE_S)
            return _Reply(
                error=LaunchError(
                    "a rank of a process pool ended",
                    rank=rank,
                    world_size=self.size,
                    seen=_exit_text(process.exitcode),
                )
            )

    def _timed_out(self, values: dict[int, object], timeout_s: float) -> CommTimeout:
        missing = tuple(r for r in range(self.size) if r not in values)
        error = CommTimeout(
            "ranks of a process pool did not answer in time", missing=missing, elapsed_s=timeout_s
        )
        for rank in missing:
            error.add_note(f"--- rank {rank}\n{_stack_file(self._folder.name, rank).read_text()}")
        return error

    def _end(self, force: bool) -> list[int | None]:
        """End the processes, killing them if `force`; return exit codes."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(b"")
        if force:
            for process in self._processes:
                process.kill()
        deadline = time.monotonic() + _CLOSE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        codes = [p.exitcode for p in self._processes]
        for process in self._processes:
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()
        return codes


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stacks-{rank}.txt"


def _serve(options: _RankOptions, pipe: connection.Connection) -> None:
    """Run one rank: join, and run functions until an empty message or the end of the pool."""
    torch.set_num_threads(1)
    with _stack_file(options.folder, options.rank).open("w") as stacks:
        reply = _attempt(_join, (options,))
        while True:
            pipe.send_bytes(_dump(reply))
            try:
                message = pipe.recv_bytes()
            except EOFError:
                return
            if not message:
                break
            fn, args, limit_s = pickle.loads(message)
            faulthandler.dump_traceback_later(limit_s, file=stacks)
            reply = _attempt(fn, (options.rank, *args))
            faulthandler.cancel_dump_traceback_later()
    if dure.is_initialized():
        dure.destroy_process_group()


def _join(options: _RankOptions) -> None:
    if options.host is not None:
        env.put("DURE_HOST_ID", options.host)
    current_world().eager_bytes = options.eager_bytes
    dure.init_process_group(
        options.backend,
        init_method=f"file://{options.folder}/store",
        rank=options.rank,
        world_size=options.size,
        timeout=timedelta(seconds=options.timeout_s),
    )


def _attempt(fn: Callable[..., object], args: tuple[object, ...]) -> _Reply:
    try:
        return _Reply(value=fn(*args))
    except BaseException as e:
        return _Reply(error=e, trace=traceback.format_exc())


def _dump(reply: _Reply) -> bytes:
    """Pickle a reply; if that fails, an error reply."""
    try:
        data = cloudpickle.dumps(reply)
        pickle.loads(data)  # an error whose constructor takes other arguments fails only here
        return data
    except Exception as e:
        text = reply.trace or f"{type(reply.value).__name__}: {e}"
        error = LaunchError("a rank's reply could not be sent", report=text, seen=text)
        return pickle.dumps(_Reply(error=error, trace=text))
