"""Ranks as processes that may die: each on a bare shm backend, without a pool's supervision."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import calls
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.request import Request
from dure.comm.backends.shm.backend import ShmBackend
from dure.comm.backends.shm.opening import create
from dure.store.base import Store
from dure.store.file import FileStore

_TEST_S = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What a rank is told."""

    rank: int
    size: int
    path: str
    timeout_s: float

    def options(self, store: Store | None = None) -> BackendOptions:
        return BackendOptions(
            store=store or FileStore(self.path, -1),
            rank=self.rank,
            size=self.size,
            global_ranks=tuple(range(self.size)),
            timeout=timedelta(seconds=self.timeout_s),
            name="test",
        )


def serve_from_rank_0(slot: Slot, run: str) -> None:
    """Set the environment of a job on one host that no launcher of Dure's started."""
    os.environ.update(
        RANK=str(slot.rank),
        WORLD_SIZE=str(slot.size),
        LOCAL_WORLD_SIZE=str(slot.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # nobody listens there
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID=run,
    )


def _main(slot: Slot, fn: Callable[..., object], args: Sequence[object], out: Connection) -> None:
    torch.set_num_threads(1)
    try:
        out.send(fn(slot, *args))
    except BaseException as error:
        out.send(error)


class Ranks:
    """Processes that run `fn(slot, *args)`; what they return, or raise, is in `results`."""

    def __init__(
        self, n: int, folder: Path, fn: Callable[..., object], *args: object, timeout_s: float = 60
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "dure.comm.backends.shm.opening"])
        self._ends: list[Connection] = []
        self.processes = []
        for rank in range(n):
            here, there = context.Pipe()
            slot = Slot(rank=rank, size=n, path=str(folder / "store"), timeout_s=timeout_s)
            process = context.Process(target=_main, args=(slot, fn, args, there), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process, end in zip(self.processes, self._ends, strict=True):
            process.kill()
            process.join(_TEST_S)
            process.close()
            end.close()

    def result(self, rank: int) -> Any:
        """Return what `rank` returned or raised; None if it died."""
        end = self._ends[rank]
        assert end.poll(_TEST_S), f"rank {rank} neither ended nor died"
        try:
            return end.recv()
        except EOFError:
            return None

    def values(self) -> list[Any]:
        """Return what all ranks returned; raise what the first failing one raised."""
        results = [self.result(r) for r in range(len(self.processes))]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def mapped_segments() -> list[str]:
    """List this process's mappings of the engine's memory files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:dure" in line]


def descriptors() -> int:
    """Count this process's open descriptors."""
    return len(os.listdir("/proc/self/fd"))


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
