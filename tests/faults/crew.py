"""Ranks for drills: processes that go from job to job, each replaced as soon as it has ended.

A drill kills a rank in every round, and a round takes some 30 ms. So the processes are forked from
a server that has imported torch, and those that live through a round serve in the next, where all
form a new group, through a file of that round's own.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

_PRELOAD = [
    *("torch", "dure.comm.init", "dure.comm.collectives", "dure.comm.objects"),
    *(
        "dure.comm.point_to_point",
        "dure.comm.shrinking",
        "dure.comm.backends.shm.backend",
        "faults.crew",
    ),
]


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank is told of its round."""

    rank: int
    size: int
    url: str


class Crew:
    """`n` processes; `run` gives each of the first of them one job."""

    def __init__(self, n: int, folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._folder, self._num_rounds = folder, 0
        self.num_started = 0
        self.ended_at: dict[int, float] = {}  # of ranks, in the last round in which they did
        self._members = [self._start() for _ in range(n)]

    def _start(self) -> tuple[BaseProcess, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        there.close()
        self.num_started += 1
        return process, here

    @property
    def pids(self) -> list[int]:
        return [process.pid or -1 for process, _ in self._members]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            self._end(member)

    def _end(self, member: tuple[BaseProcess, Connection]) -> None:
        process, pipe = member
        process.kill()
        process.join(10)
        process.close()
        pipe.close()

    def run(self, fn: Callable[..., Any], size: int, *args: object, limit_s: float) -> list[Any]:
        """Run `fn(place, *args)` on ranks 0 to `size` - 1.

        Returns:
            What each rank returned; None for one that ended. A rank that is stopped is killed when
            the others have answered.

        Raises:
            TimeoutError: A rank did not answer in time.
            Exception: What a rank raised.
        """
        self._num_rounds += 1
        path = self._folder / f"round{self._num_rounds}"
        for rank in range(size):
            place = Place(rank, size, f"file://{path}")
            self._members[rank][1].send_bytes(pickle.dumps((fn, place, args)))
        replies: dict[int, Any] = {}
        try:
            self._collect(replies, size, time.monotonic() + limit_s)
        except BaseException:
            for rank in range(size):
                self._replace(rank)  # who knows where they are
            raise
        finally:
            path.unlink(missing_ok=True)
        return [replies[rank] for rank in range(size)]

    def _collect(self, replies: dict[int, Any], size: int, deadline: float) -> None:
        while len(replies) < size:
            open_ = {self._members[r][1]: r for r in range(size) if r not in replies}
            ready = wait(list(open_), min(0.05, max(0.0, deadline - time.monotonic())))
            for pipe in ready:
                self._reply(replies, open_[pipe])  # pyright: ignore[reportArgumentType]
            stopped = [r for r in open_.values() if _is_stopped(self.pids[r])]
            if not ready and stopped and len(stopped) == len(open_):
                for rank in stopped:
                    os.kill(self.pids[rank], signal.SIGKILL)
            elif not ready and time.monotonic() > deadline:
                raise TimeoutError(
                    f"ranks {list(open_.values())} neither answered nor ended; so far {replies}"
                )

    def _reply(self, replies: dict[int, Any], rank: int) -> None:
        try:
            replies[rank] = pickle.loads(self._members[rank][1].recv_bytes())
        except (EOFError, OSError):
            replies[rank], self.ended_at[rank] = None, time.monotonic()
            self._replace(rank)
        if isinstance(replies[rank], BaseException):
            raise replies[rank]

    def _replace(self, rank: int) -> None:
        self._end(self._members[rank])
        self._members[rank] = self._start()


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        fn, place, args = pickle.loads(pipe.recv_bytes())
        try:
            reply = fn(place, *args)
        except BaseException as error:
            reply = error
        pipe.send_bytes(pickle.dumps(reply))
