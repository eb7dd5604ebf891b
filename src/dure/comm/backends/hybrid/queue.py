"""The order of a hybrid group's collectives, and the tickets of those that run beside the caller.

A synchronous call with nothing before it runs on the caller's thread. All others queue for one
thread, which begins with the first of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dure.errors import DureError

__all__ = ["OperationQueue", "QueueTicket"]

Action = Callable[[], object]


class QueueTicket:
    """A queued operation (see `backends.base.Ticket`)."""

    source = -1

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: DureError | None = None

    def finish(self, error: DureError | None) -> None:
        """End the operation."""
        self._error = error
        self._over.set()

    def done(self) -> bool:
        """See `Ticket.done`."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Ticket.wait`."""
        if not self._over.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True


@dataclass(slots=True)
class _Entry:
    action: Action
    ticket: QueueTicket = field(default_factory=QueueTicket)


class OperationQueue:
    """Runs operations one at a time, in the order of the calls.

    Args:
        name: Of the thread.
        aborted: Makes the error of operations that had not begun when the queue was stopped.
    """

    def __init__(self, name: str, aborted: Callable[[], DureError]) -> None:
        self._name, self._aborted = name, aborted
        self._lock = threading.Lock()  # of what follows
        self._work = threading.Condition(self._lock)
        self._entries: deque[_Entry] = deque()
        self._running = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether an operation runs or waits to."""
        with self._lock:
            return self._running or bool(self._entries)

    def run(self, action: Action, async_op: bool) -> QueueTicket | None:
        """Run `action` now, or behind those before it; `async_op`: return its ticket at once."""
        with self._lock:
            if self._stopped:
                raise self._aborted()
            entry = None
            if async_op or self._running or self._entries:
                entry = _Entry(action)
                self._entries.append(entry)
                self._start()
                self._work.notify()
            else:
                self._running = True
        if entry is None:
            try:
                action()
            finally:
                with self._lock:
                    self._running = False
                    self._work.notify()
            return None
        if async_op:
            return entry.ticket
        entry.ticket.wait()
        return None

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while True:
            with self._lock:
                while self._running or not self._entries:
                    if self._stopped:
                        return
                    self._work.wait()
                entry = self._entries.popleft()
                self._running = True
            error: DureError | None = None
            try:
                entry.action()
            except DureError as e:
                error = e
            with self._lock:
                self._running = False
            entry.ticket.finish(error)

    def stop(self) -> None:
        """End what has not begun, and the thread; what runs must end by other means."""
        with self._lock:
            self._stopped = True
            entries, self._entries = list(self._entries), deque[_Entry]()
            self._work.notify_all()
        for entry in entries:
            entry.ticket.finish(self._aborted())
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
