"""What all workers do together: gather values, and find out that nothing is under way any more.

**Gathering** (`gatherings`). Who has the first name of those who take part is the leader. Each
calls it with a value, and the calls are answered when all are there.

**The end.** A call may call others, so nobody knows by itself that it is done. When all have come
to the end, the leader asks each, in rounds, how many calls it has made and how many are under way
or run there. When two rounds in a row say that nothing is, and no call was made between them,
nothing is: a message under way is one of a call that somebody waits for. Who dies counts as done;
if the leader does, the next one begins anew.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from math import inf
from typing import Any

from dure.errors import PeerLost, RpcError
from dure.rpc.agent import Agent
from dure.rpc.current import current
from dure.rpc.functions import Later

__all__ = ["all_gather", "wait_all_workers", "wait_for_own"]

_MOST_S = 0.05
"""The longest time between two rounds."""


def enter(key: str, name: str, value: Any, names: set[str], without_dead: bool) -> Later:
    """Take part in a gathering, at the leader."""
    return current().gatherings.enter(key, name, value, names, without_dead)


def report() -> tuple[int, int]:
    """Return how many calls a worker has made, and how many are under way or run there now."""
    started, running = current().activity()
    return started, running - 1  # without this one


def all_gather(
    agent: Agent, value: Any, names: Collection[str] | None = None, timeout: float = -1.0
) -> dict[str, Any]:
    """Return the values of all that take part, by their names.

    Args:
        agent: This process's.
        value: This process's.
        names: Who takes part; None: all.
        timeout: Seconds; -1: the default, 0: none.

    Collective:
        All of them call, and wait for each other.

    Raises:
        PeerLost: One of them is gone.
        RpcError: The time is over.
    """
    names = set(names or (worker.name for worker in agent.workers))
    key = agent.gatherings.key(names)
    return _gather(agent, agent.find(min(names)).id, key, value, names, False, timeout)


def _gather(
    agent: Agent,
    leader: int,
    key: str,
    value: Any,
    names: set[str],
    without_dead: bool,
    timeout: float,
) -> dict[str, Any]:
    args = (key, agent.me.name, value, names, without_dead)
    return _ask(agent, leader, enter, args, timeout)


def _ask(agent: Agent, to: int, function: Any, args: tuple[Any, ...], timeout: float) -> Any:
    """Call a function of RPC's own; no shutdown waits for it."""
    return agent.ask(agent.info(to), function, args, timeout)


def wait_all_workers(agent: Agent, timeout: float = 0.0) -> None:
    """Wait until all workers have come here, and no call is under way or runs on any of them.

    Args:
        agent: This process's.
        timeout: Seconds; 0 is none.

    Raises:
        RpcError: The time is over.
    """
    deadline = time.monotonic() + timeout if timeout > 0 else inf
    while True:
        workers = agent.workers
        names = {worker.name for worker in workers}
        leader = min(workers, key=lambda worker: worker.name)
        key = f"end/{leader.id}/"
        try:
            _gather(agent, leader.id, key + "all", None, names, True, _left(deadline))
            if leader.id == agent.me.id:
                _wait_until_quiet(agent, deadline)
            _gather(agent, leader.id, key + "go", None, names, True, _left(deadline))
        except PeerLost as lost:
            if lost.peer == leader.id:
                continue
            raise
        return


def wait_for_own(agent: Agent, timeout: float = 0.0) -> None:
    """Wait until no call of this process is under way, and none runs here."""
    deadline = time.monotonic() + timeout if timeout > 0 else inf
    while agent.activity()[1]:
        _pause(agent, 0.001, deadline)


def _wait_until_quiet(agent: Agent, deadline: float) -> None:
    before, pause = (-1, -1), 0.0005
    while True:
        started = running = 0
        for worker in agent.workers:
            try:
                got = _ask(agent, worker.id, report, (), _left(deadline))
            except PeerLost:
                continue
            started, running = started + got[0], running + got[1]
        if running == 0 and before == (started, running):
            return
        before = started, running
        if running:
            _pause(agent, pause, deadline)
            pause = min(2 * pause, _MOST_S)


def _pause(agent: Agent, seconds: float, deadline: float) -> None:
    """Deal with messages for some time."""
    agent.transport.wait(agent.transport.ticket(), min(seconds, _left(deadline) or seconds))


def _left(deadline: float) -> float:
    """Return the seconds that are left; 0 is no limit.

    Raises:
        RpcError: None are.
    """
    if deadline == inf:
        return 0.0
    left = deadline - time.monotonic()
    if left <= 0:
        raise RpcError("RPC ran for more than set timeout: workers still have calls", op="shutdown")
    return left
