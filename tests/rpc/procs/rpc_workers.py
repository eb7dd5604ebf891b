"""Workers of RPC as processes of their own, that tests start and kill, and what they can do."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dure import autograd, env, rpc
from dure.store import FileStore
from tests.comm.forked_ranks import Ranks, Slot
from tests.waiting import PATIENCE_S

kept: list[rpc.RRef[Any]] = []
"""References that a worker holds because another gave them to it."""

weight = torch.ones(4, 4, requires_grad=True)

gate = threading.Event()


def double(x: Any) -> Any:
    return 2 * x


def wait_here(value: float) -> float:
    """Wait until `go_on` is called, and return the value."""
    assert gate.wait(PATIENCE_S)
    return value


def go_on() -> None:
    gate.set()


def pid() -> int:
    return os.getpid()


def chain(names: list[str], x: torch.Tensor) -> torch.Tensor:
    """Multiply by the weights of all workers named, each of which calls the next."""
    y = x @ weight
    return rpc.rpc_sync(names[0], chain, (names[1:], y)) if names else y


def keep(rref: rpc.RRef[Any]) -> int:
    """Hold a reference; return how many are held."""
    kept.append(rref)
    return len(kept)


def let_go() -> None:
    kept.clear()


def fetch(rref: rpc.RRef[Any]) -> Any:
    return rref.to_here()


def passed_on(rref: rpc.RRef[Any], to: str) -> int:
    """Hold a reference, and have another worker hold it, too."""
    keep(rref)
    return rpc.rpc_sync(to, keep, (rref,))


def gradient(names: list[str]) -> torch.Tensor:
    """Run a backward pass that this worker begins; return the gradient of its weight."""
    with autograd.context() as context:
        loss = chain(names, torch.ones(2, 4)).sum()
        autograd.backward(context, [loss])
        return autograd.get_gradients(context)[weight]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Arguments of a worker's `init_rpc`, and variables; modules are allowed by name."""

    name: str
    rank: int = -1
    world_size: int | None = None
    url: str | None = None
    allow: list[object] | None = None
    variables: dict[str, str] = field(default_factory=dict[str, str])
    store: str | None = None  # the file of one

    def init(self) -> None:
        """Join."""
        for name, value in self.variables.items():
            env.put(name, value)
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=self.url, rpc_timeout=PATIENCE_S, num_worker_threads=4
        )
        rpc.init_rpc(
            self.name,
            rank=self.rank,
            world_size=self.world_size,
            rpc_backend_options=options,
            store=None if self.store is None else FileStore(self.store, -1),
            allow=self.allow
            and [importlib.import_module(a) if isinstance(a, str) else a for a in self.allow],
        )


# ---- on the workers ------------------------------------------------------------------------------


def join(_: Slot, start: Start) -> int:
    """Join; return the id."""
    logging.getLogger("dure.rpc").setLevel(logging.CRITICAL)  # calls fail as they should
    start.init()
    return rpc.get_worker_info().id


def leave(_: Slot, graceful: bool) -> str:
    rpc.shutdown(graceful)
    return "ended"


# ---- in the test ---------------------------------------------------------------------------------


class Worker(Ranks):
    """A process that joins, and serves until `leave` or the end of a `with` block."""

    def __init__(self, start: Start) -> None:
        super().__init__(1, Path(), join, start)

    @property
    def pid(self) -> int:
        return self.pids[0]

    def joined(self) -> int:
        """Return its id; raise the error of its `init_rpc`."""
        return self.values()[0]

    def leave(self, graceful: bool = True) -> None:
        """Begin to shut down."""
        self.start(leave, graceful)

    def close(self) -> None:
        """End it, and all that it has."""
        self.__exit__()

    def left(self) -> None:
        """Wait for the end of the shutdown."""
        assert self.values() == ["ended"]


@contextmanager
def workers(*starts: Start) -> Iterator[list[Worker]]:
    """Start workers; afterwards none of them is left."""
    started: list[Worker] = []
    try:
        started.extend(Worker(start) for start in starts)
        yield started
    finally:
        for worker in started:
            worker.close()
