"""How long another host may be silent before it counts as lost, and how its silence is noticed.

A process that sorts, unpickles, collects garbage or is stopped sends nothing for a while, and
lives; so no thread of a process sends heartbeats. Kernels know better. When a process ends, its
kernel closes its connections, and its peers learn of it at once. A host that is gone, or cut off,
closes nothing: its kernel only stops answering. So connections between hosts have TCP's keep-alive
probes, which kernels send and answer by themselves; a connection is closed when nothing was
answered for `silence_s`. One setting, DURE_SILENCE, is the limit of everything that waits for a
sign of life: connections between hosts, leases of launchers, and the search for a process that is
expected at an address.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import zmq

from dure import env
from dure.errors import UsageError

__all__ = ["ListeningClock", "end_after_silence", "silence_s"]

_DEFAULT_S, _LEAST_S = 30, 2
_PROBES = 6


def silence_s(default_s: int = _DEFAULT_S) -> int:
    """Return how many seconds another host may be silent before it counts as lost (DURE_SILENCE).

    Args:
        default_s: If DURE_SILENCE is not set.

    Raises:
        UsageError: DURE_SILENCE is less than 2.
    """
    seconds = env.integer("DURE_SILENCE", default_s)
    assert seconds is not None
    if seconds < _LEAST_S:
        raise UsageError(
            "DURE_SILENCE is too small",
            seen=f"{seconds} s; a busy machine or network may be silent that long",
            fix=f"Set it to {_LEAST_S} or more seconds, or leave it unset for {default_s}.",
        )
    return seconds


def end_after_silence(socket: zmq.Socket[Any]) -> None:
    """Let the kernel close a socket's connections when the peer's host is silent for `silence_s`.

    Called before the socket is connected or bound. Connections that carry nothing are probed; on
    Linux what was sent must be acknowledged within that time, too.
    """
    seconds = silence_s()
    interval = max(1, seconds // _PROBES)
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = interval
    socket.tcp_keepalive_cnt = max(1, math.ceil(seconds / interval) - 1)
    socket.tcp_maxrt = 1000 * seconds


class ListeningClock:
    """A clock that stands still while its owner is paused.

    A thread that was stopped, or whose interpreter was busy, or whose machine was paused, has read
    nothing in that time; it reads next what has arrived. So that time is no silence of others.

    Args:
        clock: The clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._paused_s = clock, 0.0
        self._due = float("inf")

    def now(self) -> float:
        """Return the time; a pause since the last `turn` does not count either."""
        return min(self._clock(), self._due) - self._paused_s

    def turn(self, within_s: float = float("inf")) -> None:
        """Note that the owner runs, and will call this again in `within_s` unless it is paused.

        Time past what the last call announced was a pause.
        """
        now = self._clock()
        self._paused_s += max(0.0, now - self._due)
        self._due = now + within_s
