"""Operations of all workers: gather values, and detect that no call is under way anymore.

**Gathering.** The worker with the first name is the leader. Each worker calls it with a value, and
the calls are answered when all have been made.

**The end.** A call may make other calls, so no process knows by itself that it is done. When all
workers have called `shutdown`, the leader asks each, in rounds, how many calls it has made and how
many are pending or run there. When two rounds in a row find none, and no call was made between
them, none is under way: a message under way would belong to a call that some worker waits for. A
worker that dies counts as done; if the leader dies, the next one starts again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from dure.errors import PeerLost, RpcError, UsageError
from dure.rpc.current import current
from dure.rpc.functions import DeferredResult

if TYPE_CHECKING:
    from dure.rpc.agent import RpcAgent

__all__ = ["Gatherings", "all_gather", "wait_all_workers", "wait_for_own"]

_MOST_S = 0.05
"""The longest pause between two rounds."""

Future = torch.futures.Future[Any]


@dataclass(slots=True)
class _Gathering:
    names: set[str]
    without_dead: bool
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    futures: dict[str, Future] = field(default_factory=dict[str, Future])


class Gatherings:
    """The gatherings that this process leads, and how many it has entered."""

    def __init__(self, agent: RpcAgent) -> None:
        self._agent, self._lock = agent, threading.Lock()
        self._open: dict[str, _Gathering] = {}
        self._counts: dict[str, int] = {}

    def key(self, names: Collection[str]) -> str:
        """Return a key for the next gathering of these workers, equal on all of them."""
        joined = ",".join(sorted(names))
        with self._lock:
            self._counts[joined] = number = self._counts.get(joined, 0) + 1
        return f"{number}/{joined}"

    def enter(
        self, key: str, name: str, value: Any, names: set[str], without_dead: bool
    ) -> DeferredResult:
        """Add a value; the answer, when all workers have entered, is all values."""
        future = torch.futures.Future[Any]()
        with self._lock:
            gathering = self._open.setdefault(key, _Gathering(names, without_dead))
            gathering.values[name], gathering.futures[name] = value, future
        for dead in names - {worker.name for worker in self._agent.workers}:  # since the call
            self.died(dead, PeerLost(f"worker {dead!r} is gone", op="gathering"))
        self._look(key)
        return DeferredResult(future, counted=False)

    def died(self, name: str, error: PeerLost) -> None:
        """Continue without a worker that died, or fail gatherings that need it."""
        with self._lock:
            concerned = {key: g for key, g in self._open.items() if name in g.names}
            for key, gathering in concerned.items():
                gathering.names.discard(name)
                if not gathering.without_dead:
                    del self._open[key]
        for key, gathering in concerned.items():
            if gathering.without_dead:
                self._look(key)
            else:
                for future in gathering.futures.values():
                    future.set_exception(error)

    def _look(self, key: str) -> None:
        """Answer if all workers have entered, the leader last, because it may exit then."""
        with self._lock:
            gathering = self._open.get(key)
            if gathering is None or not gathering.names <= gathering.values.keys():
                return
            del self._open[key]
        for name in sorted(gathering.futures, reverse=True):
            gathering.futures[name].set_result(gathering.values)


def enter(key: str, name: str, value: Any, names: set[str], without_dead: bool) -> DeferredResult:
    """Take part in a gathering, at the leader."""
    return current().gatherings.enter(key, name, value, names, without_dead)


def report() -> tuple[int, int]:
    """Return how many calls a worker has made, and how many are pending or run there."""
    started, running = current().activity()
    return started, running - 1  # without this one


def all_gather(
    agent: RpcAgent, value: Any, names: Collection[str] | None = None, timeout: float = -1.0
) -> dict[str, Any]:
    """Return the values of some workers, by their names.

    Args:
        agent: The agent of this process.
        value: The value of this process.
        names: The workers; if None, all.
        timeout: Seconds; -1 for the default, 0 for none.

    Collective:
        All of these workers call, and wait for each other.

    Raises:
        UsageError: This process is not one of them.
        PeerLost: One of them is gone.
        RpcError: The call has timed out.
    """
    names = set(names or (worker.name for worker in agent.workers))
    if agent.me.name not in names:
        raise UsageError(
            "this worker is not one of those that were named",
            op="gathering",
            seen=f"{agent.me.name!r} is not among {', '.join(sorted(names))}",
            fix="Call it only on the workers that are named, with the same names on each.",
        )
    args = agent.gatherings.key(names), agent.me.name, value, names, False
    return agent.caller.ask(min(names), enter, args, timeout)


def wait_all_workers(agent: RpcAgent, timeout: float = 0.0) -> None:
    """Wait until all workers have called this, and no call is pending or runs on any of them.

    Args:
        agent: The agent of this process.
        timeout: Seconds; 0 for none.

    Raises:
        RpcError: The wait has timed out.
    """
    deadline = time.monotonic() + timeout if timeout > 0 else inf
    while True:
        workers = agent.workers
        leader = min(workers, key=lambda worker: worker.name)
        rest = agent.me.name, None, {worker.name for worker in workers}, True
        try:
            agent.caller.ask(leader, enter, (f"end/{leader.id}/all", *rest), _left(deadline))
            if leader.id == agent.me.id:
                _wait_until_quiet(agent, deadline)
            agent.caller.ask(leader, enter, (f"end/{leader.id}/go", *rest), _left(deadline))
        except PeerLost as lost:
            if lost.peer == leader.id:
                continue
            raise
        return


def wait_for_own(agent: RpcAgent, timeout: float = 0.0) -> None:
    """Wait until no call of this process is pending, and none runs here."""
    deadline = time.monotonic() + timeout if timeout > 0 else inf
    while agent.activity()[1]:
        _pause(agent, 0.001, deadline)


def _wait_until_quiet(agent: RpcAgent, deadline: float) -> None:
    before, pause = (-1, -1), 0.0005
    while True:
        started = running = 0
        for worker in agent.workers:
            try:
                got = agent.caller.ask(worker, report, (), _left(deadline))
            except PeerLost:
                continue
            started, running = started + got[0], running + got[1]
        if running == 0 and before == (started, running):
            return
        before = started, running
        if running:
            _pause(agent, pause, deadline)
            pause = min(2 * pause, _MOST_S)


def _pause(agent: RpcAgent, seconds: float, deadline: float) -> None:
    """Receive messages for some time."""
    agent.transport.wait(agent.transport.ticket(), min(seconds, _left(deadline) or seconds))


def _left(deadline: float) -> float:
    """Return the seconds until a deadline; 0 for none.

    Raises:
        RpcError: It has passed.
    """
    if deadline == inf:
        return 0.0
    left = deadline - time.monotonic()
    if left <= 0:
        raise RpcError("RPC ran for more than set timeout: workers still have calls", op="shutdown")
    return left
