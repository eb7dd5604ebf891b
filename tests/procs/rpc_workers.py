"""Workers of RPC as processes of their own, that tests start and kill, and what they can do."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from dure import autograd, env, rpc
from dure.store import FileStore
from dure.testing.pool import start_server

kept: list[rpc.RRef[Any]] = []
"""References that a worker holds because another gave them to it."""

weight = torch.ones(4, 4, requires_grad=True)


def double(x: Any) -> Any:
    return 2 * x


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


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
    timeout_s: float = 30.0
    store: str | None = None  # the file of one

    def init(self) -> None:
        """Join."""
        for name, value in self.variables.items():
            env.put(name, value)
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=self.url, rpc_timeout=self.timeout_s, num_worker_threads=4
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


def serve(start: Start, pipe: Connection) -> None:
    """Join, and serve until the pipe says whether to shut down gracefully, or closes."""
    torch.set_num_threads(1)
    logging.getLogger("dure.rpc").setLevel(logging.CRITICAL)  # calls fail as they should
    try:
        start.init()
    except Exception as error:
        pipe.send(error)
        return
    pipe.send(rpc.get_worker_info().id)
    try:
        graceful = pipe.recv()
    except EOFError:
        return
    rpc.shutdown(graceful)
    pipe.send("ended")


@dataclass
class Worker:
    """A worker that was started; `pipe` says its id, or the error of its `init_rpc`, first."""

    name: str
    process: BaseProcess
    pipe: Connection

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def said(self, limit_s: float = 60.0) -> Any:
        """Return what it says next."""
        assert self.pipe.poll(limit_s), f"{self.name} says nothing"
        return self.pipe.recv()

    def close(self) -> None:
        """End it, and all that it has."""
        self.pipe.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def begun(start: Start) -> Worker:
    """Start a worker; does not wait for it."""
    context = start_server()
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(start, theirs), daemon=True)
    process.start()
    theirs.close()
    return Worker(start.name, process, pipe)


@contextmanager
def workers(*starts: Start) -> Iterator[list[Worker]]:
    """Start workers; afterwards none of them is left."""
    started: list[Worker] = []
    try:
        started.extend(begun(start) for start in starts)
        yield started
    finally:
        for worker in started:
            worker.close()
