"""Which agent the calling thread means: the process's, or, in tests, one of several."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dure.errors import RpcError

if TYPE_CHECKING:
    from dure.rpc.agent import Agent

__all__ = ["current", "here", "is_set", "set_current", "using"]


class _Here(threading.local):
    """What a thread does for RPC.

    Attributes:
        agent: The one it means, if not the process's.
        serves: Whether it runs a call.
        context: The context of distributed autograd that it is in.
    """

    agent: Agent | None = None
    serves = False
    context: int | None = None


here = _Here()
_process: list[Agent] = []


def _forget() -> None:
    """In a forked child: the agent is the parent's, and so are its threads and its references."""
    for agent in _process:
        agent.calls.closed = True
    _process.clear()
    here.__dict__.clear()


os.register_at_fork(after_in_child=_forget)


def current() -> Agent:
    """Return the agent of this thread, or of the process.

    Raises:
        RpcError: There is none.
    """
    agent = here.agent or (_process[0] if _process else None)
    if agent is None:
        raise RpcError(
            "RPC has not been initialized. Current RPC agent is not set! Did you initialize the "
            "RPC framework with dure.rpc.init_rpc?"
        )
    return agent


def is_set() -> bool:
    """Whether there is an agent."""
    return bool(_process) or here.agent is not None


def set_current(agent: Agent | None) -> None:
    """Set the process's agent."""
    _process[:] = [] if agent is None else [agent]


@contextmanager
def using(agent: Agent) -> Iterator[None]:
    """While within: `current` is `agent` for this thread."""
    before, here.agent = here.agent, agent
    try:
        yield
    finally:
        here.agent = before
