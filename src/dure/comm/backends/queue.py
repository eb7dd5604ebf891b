"""The ordered queue: collectives of one group that run one at a time, in the order of the calls.

A synchronous call runs on the caller's thread if the queue is empty. All others run on one thread,
which is started by the first of them. An action may return a request (an engine's work) instead of
completing the operation: then the queue continues with the next action, and a wait for the queued
request includes that request.

An exception of an action ends its request, and the thread continues: a `DureError` is raised
unchanged, any other exception (such as no memory for scratch) as `InternalError`.

Threads:
    Every method, from any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from dure.comm.backends.request import Request, seconds_until
from dure.errors import DureError, InternalError

Action = Callable[[], Request | None]
_END_S = 5.0


class _QueuedRequest(Request):
    """A queued operation: it waits for its action, then for the request that this returned."""

    __slots__ = ("_begun", "_inner", "action")

    def __init__(self, action: Action) -> None:
        super().__init__()
        self.action: Action | None = action
        self._begun = threading.Event()
        self._inner: Request | None = None

    def begin(self) -> None:
        """Run the action; its exceptions end the request."""
        action, self.action = self.action, None
        assert action is not None
        error: DureError | None = None
        try:
            self._inner = action()
        except DureError as e:
            error = e
        except BaseException as e:
            error = InternalError("an operation failed", seen=f"{type(e).__name__}: {e}")
            error.__cause__ = e
        if self._inner is None:
            self.end(error)
        self._begun.set()

    def drop(self, error: DureError) -> None:
        """End without running the action."""
        self.action = None
        self.end(error)
        self._begun.set()

    def _poll(self) -> None:
        if self._inner is not None and self._inner.done():
            self._await(None)

    def _await(self, limit: float | None) -> bool:
        if not self._begun.wait(seconds_until(limit)):
            return False
        try:
            if self._inner is not None and not self._inner.wait(seconds_until(limit)):
                return False
        except DureError as e:
            self.end(e)
        self.end(None)
        return True


class OrderedQueue:
    """Runs operations one at a time, in the order of the calls.

    Args:
        name: Of the thread.
        aborted: Makes the error of operations that had not begun when the queue was stopped.
    """

    def __init__(self, name: str, aborted: Callable[[], DureError]) -> None:
        self._name, self._aborted = name, aborted
        self._work = threading.Condition()  # guards the fields below
        self._entries: deque[_QueuedRequest] = deque()
        self._running = self._stopped = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether an operation runs or waits to."""
        with self._work:
            return self._running or bool(self._entries)

    def run(self, action: Action, async_op: bool) -> Request | None:
        """Run `action` after those before it; with `async_op` return its request at once."""
        with self._work:
            if self._stopped:
                raise self._aborted()
            entry = None
            if async_op or self._running or self._entries:
                entry = _QueuedRequest(action)
                self._entries.append(entry)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._serve, name=self._name, daemon=True
                    )
                    self._thread.start()
                self._work.notify()
            else:
                self._running = True
        if entry is None:
            try:
                inner = action()
            finally:
                with self._work:
                    self._running = False
                    self._work.notify()
            if inner is not None:
                inner.wait()
            return None
        if async_op:
            return entry
        entry.wait()
        return None

    def _serve(self) -> None:
        while True:
            with self._work:
                while self._running or not self._entries:
                    if self._stopped:
                        return
                    self._work.wait()
                entry = self._entries.popleft()
                self._running = True
            try:
                entry.begin()
            finally:
                with self._work:
                    self._running = False
            del entry  # otherwise an idle thread would keep its tensors

    def stop(self) -> None:
        """End queued operations and the thread; the caller ends the one that is running."""
        with self._work:
            self._stopped = True
            entries, self._entries = list(self._entries), deque[_QueuedRequest]()
            self._work.notify_all()
        for entry in entries:
            entry.drop(self._aborted())
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_S)
