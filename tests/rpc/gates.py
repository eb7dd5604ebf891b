"""Functions that tests of remote calls call, and a gate at which calls wait for the test."""

from __future__ import annotations

import threading
from typing import Any

from dure.rpc import api
from dure.rpc.agent import RpcAgent
from dure.rpc.references import References, RefId
from tests.rpc.cluster import Cluster as Workers
from tests.waiting import PATIENCE_S


class Gate:
    """Lets calls wait for the test; there is one at a time, new for each test."""

    reached = threading.Semaphore(0)
    open = threading.Event()

    @classmethod
    def renew(cls) -> None:
        cls.reached, cls.open = threading.Semaphore(0), threading.Event()

    @classmethod
    def wait_for(cls, number: int = 1) -> None:
        """Wait until so many more calls have come to the gate."""
        for _ in range(number):
            assert cls.reached.acquire(timeout=PATIENCE_S), "nobody comes to the gate"


class Cluster(Workers):
    """Workers, whose calls at the gate go on at the end, also of a test that fails."""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: Any) -> None:
        Gate.open.set()
        super().__exit__(*error)


def references_to_others(references: References) -> dict[RefId, int]:
    """Return the owner of each value that a process holds."""
    entries = list(references._entries.items())
    return {ref: entry.owner for ref, entry in entries if entry.owner != references.me}


def held(agent: RpcAgent) -> bool:
    """Whether others hold values of a worker, or it holds values of others."""
    agent.values.forget_gone()
    return bool(agent.values.counts[0] or references_to_others(agent.values._references))


def wait_at_gate(value: Any = None) -> Any:
    gate = Gate.open
    Gate.reached.release()
    assert gate.wait(PATIENCE_S), "the gate stays shut"
    return value


def who(value: int = 0) -> tuple[str, int]:
    return api.get_worker_info().name, value


def add(a: Any, b: Any) -> Any:
    return a + b


def fail(text: str) -> None:
    raise ValueError(text)


def relay(path: list[str], value: int) -> list[tuple[str, int]]:
    here = [who(value)]
    return here if not path else here + api.rpc_sync(path[0], relay, (path[1:], value + 1))
