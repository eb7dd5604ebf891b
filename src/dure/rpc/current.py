"""The agent of the calling thread: that of the process, or in tests one of several."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from dure.errors import RpcError

if TYPE_CHECKING:
    from dure.rpc.agent import RpcAgent

__all__ = ["current", "here", "is_set", "set_current"]


class _RpcThreadState(threading.local):
    """The state of a thread.

    Attributes:
        agent: Its agent, if not the process's.
        context: The context of distributed autograd that it is in.
    """

    agent: RpcAgent | None = None
    context: int | None = None


here = _RpcThreadState()
_process: list[RpcAgent] = []


def _forget() -> None:
    """In a forked child: forget the agent, whose threads and references are the parent's."""
    for agent in _process:
        agent.calls.closed = True
    _process.clear()
    here.__dict__.clear()


os.register_at_fork(after_in_child=_forget)


def current() -> RpcAgent:
    """Return the agent of this thread, or of the process.

    Raises:
        RpcError: RPC has not been initialized.
    """
    agent = here.agent or (_process[0] if _process else None)
    if agent is None:
        raise RpcError(
            "RPC has not been initialized. Current RPC agent is not set! Did you initialize the "
            "RPC framework with dure.rpc.init_rpc?"
        )
    return agent


def is_set() -> bool:
    """Whether RPC has been initialized."""
    return bool(_process) or here.agent is not None


def set_current(agent: RpcAgent | None) -> None:
    """Set the process's agent."""
    _process[:] = [] if agent is None else [agent]
