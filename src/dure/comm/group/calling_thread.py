"""One thread at a time inside the synchronous collectives of a channel.

Calls of two threads at once have no order, and may match another thread's call on another rank. So
the second call is refused, and its rank leaves the group when the first thread's call has finished.
A thread that only starts an operation, or waits for one, is not inside a call. The engine of `shm`
has its own check (csrc/core/threads.cpp).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dure.comm.call import call_site

__all__ = ["CallingThread", "Crossed", "ExclusiveCall"]


class Crossed(Exception):
    """A thread called while another one was inside a call; the text names both."""


class CallingThread:
    """The thread inside a synchronous call of a channel.

    Attributes:
        crossed: A text that names two threads that were inside calls at once; "" if none were.

    Threads:
        Every method, from any thread; one operation of a dictionary each, so that no lock is
        needed.
    """

    def __init__(self, crossed: str = "") -> None:
        self.crossed = crossed
        self._inside: dict[int, tuple[int, str, str]] = {}  # at 0: number, name, call site

    def enter(self, waits: bool) -> bool:
        """Enter a call, if no other thread is inside one.

        Args:
            waits: Whether the call waits for its end.

        Returns:
            Whether the thread was outside before, and must leave.

        Raises:
            Crossed: Another thread is inside a call.
        """
        me = (threading.get_ident(), threading.current_thread().name, call_site())
        first = self._inside.setdefault(0, me) if waits else self._inside.get(0, me)
        if first[0] == me[0]:
            return waits and first is me
        raise Crossed(
            "two threads called collectives of one channel at the same time: "
            f"{first[1]} is inside a call at {first[2]}, and {me[1]} called at {me[2]}"
        )

    def leave(self) -> None:
        """End what `enter` began."""
        self._inside.pop(0, None)


class ExclusiveCall:
    """The context manager of `GroupCore.hold`; a generator would hide the program's call site."""

    def __init__(self, enter: Callable[[], bool], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._entered = self._enter()

    def __exit__(self, *error: object) -> None:
        if self._entered:
            self._leave()
