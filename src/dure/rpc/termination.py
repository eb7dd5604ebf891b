"""Operations of all workers: gather values, and detect that no call is under way anymore.

**Gathering.** The worker with the first name is the leader. Each worker calls it with a value, and
the calls are answered when all have been made. A call has a digest of the workers' names. If the
leader does not know the names (they are not those of all workers that it knows), it asks for them,
so that they are sent once and not by each worker.

**The end.** A call may make other calls, so no process knows by itself that it is done. When all
workers have called `shutdown`, the leader asks each, in rounds, how many calls it has made and how
many are pending or run there. When two rounds in a row find none, and no call was made between
them, none is under way: a message under way would belong to a call that some worker waits for. A
worker that dies counts as done; if the leader dies, the next one starts again.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.errors import PeerLost, RpcError, UsageError
from dure.rpc.current import current
from dure.rpc.functions import DeferredResult

if TYPE_CHECKING:
    from dure.rpc.agent import RpcAgent
    from dure.rpc.names import WorkerInfo

__all__ = ["Gatherings", "all_gather", "wait_all_workers", "wait_for_own"]

_DIGEST_BYTES = 16
_SEND_NAMES = "send names"
"""Answer of a leader that does not know the names of a gathering's workers."""

_MOST_S = 0.05
"""The longest pause between two rounds."""

Future = torch.futures.Future[Any]


@dataclass(slots=True)
class _Gathering:
    names: set[str]
    without_dead: bool
    returns_values: bool
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    futures: dict[str, Future] = field(default_factory=dict[str, Future])


class Gatherings:
    """The gatherings that this process leads, and how many it has entered."""

    def __init__(self, agent: RpcAgent) -> None:
        self._agent, self._lock = agent, threading.Lock()
        self._open: dict[str, _Gathering] = {}
        self._counts: dict[str, int] = {}

    def number(self, digest: str) -> int:
        """Return the number of the next gathering of these workers, equal on all of them."""
        with self._lock:
            self._counts[digest] = number = self._counts.get(digest, 0) + 1
        return number

    def enter(self, entry: GatheringEntry) -> DeferredResult | str:
        """Add a value; the answer, when all workers have entered, is all values.

        Returns:
            The answer, or `_SEND_NAMES`.
        """
        future, living = torch.futures.Future[Any](), {w.name for w in self._agent.workers}
        with self._lock:
            gathering = self._open.get(entry.key)
            if gathering is None:
                names = entry.names
                if names is None and entry.digest in ("", digest_of(living)):
                    names = living
                if names is None:
                    return _SEND_NAMES
                gathering = _Gathering(set(names), entry.without_dead, entry.returns_values)
                self._open[entry.key] = gathering
            gathering.values[entry.name], gathering.futures[entry.name] = entry.value, future
            dead_names = gathering.names - living
        for dead in dead_names:  # since the call
            self.died(dead, PeerLost(f"worker {dead!r} is gone", op="gathering"))
        self._look(entry.key)
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
        answer = gathering.values if gathering.returns_values else None
        for name in sorted(gathering.futures, reverse=True):
            gathering.futures[name].set_result(answer)


class GatheringEntry(NamedTuple):
    """What a worker sends to take part in a gathering, as a plain tuple.

    Attributes:
        key: Identifies the gathering.
        name: Of the worker.
        value: Its value.
        digest: Of the names of all workers that take part; "": all workers that the leader knows.
        names: These names; None if the leader is assumed to know them.
        without_dead: Whether the gathering continues without a worker that dies.
        returns_values: Whether the answer has the values of all workers.
    """

    key: str
    name: str
    value: Any = None
    digest: str = ""
    names: tuple[str, ...] | None = None
    without_dead: bool = False
    returns_values: bool = True


def digest_of(names: Collection[str]) -> str:
    """Return a short text that differs for other names."""
    joined = ",".join(sorted(names)).encode()
    return hashlib.blake2b(joined, digest_size=_DIGEST_BYTES).hexdigest()


def enter(*fields: Any) -> DeferredResult | str:
    """Take part in a gathering, at the leader; the arguments are those of a `GatheringEntry`."""
    return current().gatherings.enter(GatheringEntry(*fields))


def report() -> tuple[int, int]:
    """Return how many calls a worker has made, and how many are pending or run there."""
    started, running = current().activity()
    return started, running - 1  # without this one


def all_gather(
    agent: RpcAgent,
    value: Any,
    names: Collection[str] | None = None,
    timeout: float = -1.0,
    returns_values: bool = True,
) -> dict[str, Any] | None:
    """Return the values of some workers, by their names.

    Args:
        agent: The agent of this process.
        value: The value of this process.
        names: The workers; if None, all.
        timeout: Seconds; -1 for the default, 0 for none.
        returns_values: If False, only wait for the others, and return None.

    Collective:
        All of these workers call, and wait for each other.

    Cost:
        One call of the leader, and its answer with the values of all. A second call, with the names
        of all, if the leader does not know them.

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
    digest = digest_of(names)
    entry = GatheringEntry(
        key=f"{agent.gatherings.number(digest)}/{digest}",
        name=agent.me.name,
        value=value,
        digest=digest,
        returns_values=returns_values,
    )
    answer = agent.caller.ask(min(names), enter, tuple(entry), timeout)
    if answer == _SEND_NAMES:
        entry = entry._replace(names=tuple(names))
        answer = agent.caller.ask(min(names), enter, tuple(entry), timeout)
    return answer


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
        try:
            agent.caller.ask(leader, enter, _end(agent, leader, "all"), _left(deadline))
            if leader.id == agent.me.id:
                _wait_until_quiet(agent, deadline)
            agent.caller.ask(leader, enter, _end(agent, leader, "go"), _left(deadline))
        except PeerLost as lost:
            if lost.peer == leader.id:
                continue
            raise
        return


def _end(agent: RpcAgent, leader: WorkerInfo, step: str) -> tuple[Any, ...]:
    """Return the entry for a step of the end, in which all workers that live take part."""
    key = f"end/{leader.id}/{step}"
    entry = GatheringEntry(key, agent.me.name, without_dead=True, returns_values=False)
    return tuple(entry)


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
