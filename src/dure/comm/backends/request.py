"""`Request`: a pending operation of any backend.

A request is *pending* and then permanently *ended*: successfully, or with an error that every
`wait` raises. If another thread makes progress, that thread calls `end`, and waiting threads sleep
until then: this class is enough. If an operation makes progress only when polled (requests of MPI;
torch's work, which must be waited for in slices), a subclass overrides `_poll` and `_await`.

In a child process that was forked while a request was pending no thread can end it: there it counts
as done, and every `wait` raises `UsageError`.

Threads:
    Every method, from any thread, at any time.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from dure.native.status import left_behind

if TYPE_CHECKING:
    import torch

_forks = 0
"""The number of forks since this module was imported."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def num_forks() -> int:
    """Return how many forks led to this process: another number in a forked child."""
    return _forks


def seconds_until(limit: float | None) -> float | None:
    """Return the seconds until `limit` (`time.monotonic`), at least 0; None without a limit."""
    if limit is None:
        return None
    return min(max(0.0, limit - time.monotonic()), threading.TIMEOUT_MAX)


class Request:
    """A pending operation (see the module's text).

    Args:
        keep: Objects to keep alive while it is pending: the tensors.

    Attributes:
        ended: Whether it has ended, successfully or not.
        error: The error it ended with; None while it is pending, or after a success.
        source: Group rank of the sender of a finished receive; -1 otherwise.

    Obtained from:
        A custom `Backend` makes them; programs get a `Work`.
    """

    __slots__ = ("__weakref__", "_forks", "_keep", "_lock", "_over", "ended", "error", "source")

    stream_device: torch.device | None = None
    """The device whose current stream waits, instead of the host, in `wait`.

    None: the host waits.
    """

    def __init__(self, keep: object = None) -> None:
        self._keep = keep
        self._lock = threading.Lock()  # held while it ends
        self._over: threading.Event | None = None  # made by the first thread that sleeps
        self._forks = _forks
        self.ended = False
        self.error: Exception | None = None
        self.source = -1

    def end(self, error: Exception | None = None, source: int = -1) -> bool:
        """End it and wake waiting threads; return False, without effect, if it had ended."""
        with self._lock:
            if self.ended:
                return False
            self.error, self._keep = error, None
            if source >= 0:
                self.source = source
            self.ended = True
            over = self._over
        if over is not None:
            over.set()
        return True

    def done(self) -> bool:
        """Return, without blocking, whether it has ended, successfully or not."""
        if not self.ended:
            if self._left_behind():
                return True
            self._poll()
        return self.ended

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; raise its error, if it has one.

        Returns:
            True if it ended; False if `timeout_s` passed first (the operation continues).
        """
        if not self.ended:
            if self._left_behind():
                raise left_behind()
            if not self._await(None if timeout_s is None else time.monotonic() + timeout_s):
                return False
        if self.error is not None:
            raise self.error
        return True

    def wait_aside(self) -> None:
        """Wait without spinning, on a helper thread that must not occupy a core."""
        self.wait()

    def _left_behind(self) -> bool:
        """Return whether this process was forked since, so that no thread can end the request."""
        return self._forks != _forks

    def _poll(self) -> None:
        """Make what progress can be made without blocking."""

    def _await(self, limit: float | None) -> bool:
        """Block until it has ended, or until `limit` (`time.monotonic`); return whether it has."""
        with self._lock:
            if self.ended:
                return True
            over = self._over = self._over or threading.Event()
        over.wait(seconds_until(limit))
        return self.ended


def current_stream(device: torch.device) -> Any:
    """Return the current stream of a device that has streams."""
    import torch  # lazy: requests are made without torch, too

    return torch.get_device_module(device).current_stream(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is captured in a graph of the device."""
    import torch  # lazy: requests are made without torch, too

    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and ask()


def used_in_stream(memory: torch.Tensor) -> None:
    """Keep freed `memory` from reuse until the current stream, too, is done with it.

    An accelerator's allocator only knows the stream that was current when it allocated the memory.
    """
    if memory.device.type not in ("cpu", "meta"):
        memory.record_stream(current_stream(memory.device))


def finished(source: int = -1) -> Request:
    """Return the request of an operation that was completed at once."""
    request = Request()
    request.end(source=source)
    return request
