"""Ranks as threads of one process, for tests.

Each rank is a thread with its own world (`dure.comm.world`): `dure.get_rank()`, the default group
and everything made from it belong to that rank. No process is started and torch is not imported
again, so starting 128 ranks takes milliseconds.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Concatenate, Generic, ParamSpec, TypeVar

import dure
from dure import env
from dure.comm.world import new_world
from dure.errors import CommTimeout, UsageError
from dure.store.memory import HashStore

__all__ = ["run_ranks"]

P = ParamSpec("P")
T = TypeVar("T")
_GRACE_S = 1.0
"""Ranks that wait in a call until the timeout raise within this time, with whom they wait for."""


def run_ranks(
    n: int,
    fn: Callable[Concatenate[int, ...], T],
    *args: object,
    backend: str = "threads",
    timeout: float | None = None,
    eager_bytes: int | None = None,
) -> list[T]:
    """Run `fn(rank, *args)` on `n` ranks that are threads.

    The default group is initialized before `fn` and destroyed after it, on every rank.

    Args:
        n: Number of ranks.
        fn: The function; it uses `dure` like the program of one rank.
        *args: Arguments; all ranks get the same objects.
        backend: A backend whose ranks can be threads: "threads" or "gloo".
        timeout: The group's timeout in seconds. A second later, ranks that have not finished are
            reported. None: the environment variable DURE_TEST_TIMEOUT, or 30.
        eager_bytes: Larger sends wait until they are received, as they may on any backend; with 0
            all sends do. This finds programs that only work because sends are buffered: if all
            ranks wait for each other, they raise `CommTimeout`. Only on "threads", where sends
            otherwise never wait.

    Returns:
        The results in rank order.

    Raises:
        Exception: The first error of any rank, with the rank in a note; the other ranks then raise
            `PeerLost`.
        CommTimeout: Ranks did not finish in time; `missing` has them, stderr shows their stacks.
        UsageError: `eager_bytes` is negative, or the backend does not support it.

    Cost:
        One thread per rank; 128 ranks start in milliseconds.

    Example:
        ```python
        from dure.testing import run_ranks

        def total(rank: int) -> float:
            x = torch.tensor([1.0 + rank])
            dist.all_reduce(x)
            return x.item()

        assert run_ranks(4, total) == [10.0] * 4
        ```
    """
    if eager_bytes is not None and (backend != "threads" or eager_bytes < 0):
        raise UsageError(
            "eager_bytes must not be negative, and is for the threads backend",
            op="run_ranks",
            seen=f"eager_bytes={eager_bytes}, backend={backend!r}",
        )
    timeout = default_timeout_s() if timeout is None else timeout
    job = _ThreadRanks[T](n, backend, timeout, eager_bytes)
    threads = [
        threading.Thread(target=job.run, args=(r, fn, args), name=f"dure-rank-{r}", daemon=True)
        for r in range(n)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout + _GRACE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = tuple(r for r, thread in enumerate(threads) if thread.is_alive())
    if stuck:
        print_stacks(threads)
    job.raise_first_error()
    if stuck:
        raise CommTimeout(
            "thread-ranks did not end in time",
            missing=stuck,
            world_size=n,
            elapsed_s=timeout + _GRACE_S,
        )
    return [job.results[r] for r in range(n)]


def default_timeout_s() -> float:
    """Return the default timeout of `run_ranks` and `ProcessPool`, in seconds."""
    return float(env.integer("DURE_TEST_TIMEOUT", 30) or 30)


def print_stacks(threads: list[threading.Thread]) -> None:
    """Print to stderr where each of `threads` is."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    for thread in threads:
        frame = frames.get(thread.ident or -1)
        where = "".join(traceback.format_stack(frame)) if frame else "  has ended\n"
        print(f"--- {thread.name}\n{where}", file=sys.stderr, end="")


class _ThreadRanks(Generic[T]):
    """One call of `run_ranks`. Threads: every rank writes its own result; errors under `lock`."""

    def __init__(self, n: int, backend: str, timeout: float, eager_bytes: int | None) -> None:
        self.eager_bytes = eager_bytes
        self.n, self.backend, self.timeout = n, backend, timedelta(seconds=timeout)
        self.store = HashStore()
        self.lock = threading.Lock()
        self.results: dict[int, T] = {}
        self.errors: list[tuple[int, BaseException]] = []

    def run(self, rank: int, fn: Callable[..., T], args: tuple[object, ...]) -> None:
        """Run one rank."""
        with new_world() as world:
            world.eager_bytes = self.eager_bytes
            try:
                dure.init_process_group(
                    self.backend,
                    store=self.store,
                    rank=rank,
                    world_size=self.n,
                    timeout=self.timeout,
                )
                self.results[rank] = fn(rank, *args)
            except BaseException as e:
                self.note(rank, e)
            try:
                if dure.is_initialized():
                    dure.destroy_process_group()
            except BaseException as e:
                self.note(rank, e)

    def note(self, rank: int, error: BaseException) -> None:
        """Record an error of a rank; the first one of all ranks is raised."""
        with self.lock:
            self.errors.append((rank, error))

    def raise_first_error(self) -> None:
        """Raise the first error, if there is one, with the rank in a note."""
        with self.lock:
            if not self.errors:
                return
            rank, error = self.errors[0]
        error.add_note(f"raised on rank {rank} of {self.n} thread-ranks")
        raise error
