"""A pending operation, for torch.distributed and its C++ code.

**Lifetime.** If C++ code (DDP's reducer, a functional collective) holds a work that was made in
Python, the Python half of the object can be destroyed while the C++ half lives. `wait` is then the
method of the base class, which waits forever. So the finalizer of a work that was never waited for
passes it to `UnwaitedWorks`, which keeps it until it has ended, and until some later works have
ended (without its tensors if they are large).

**Errors in futures.** C++ cannot see an error that Python sets on a future, and continues as if
the operation had succeeded. It can see an error that a callback raises. So `get_future` returns the
future of a callback that raises the operation's error.

**Threads.** A future is set by a thread that waits for the operation (`Waiters` of
comm/futures.py): `get_future` returns at once, and the engine moves data without a waiting caller.
"""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch

from dure.comm.futures import Waiters
from dure.comm.work import Work
from dure.torch_backend.compiling import opaque
from dure.torch_private import c10d

__all__ = ["CompletedWork", "TorchWork", "UnwaitedWorks"]

_REMEMBERED = 64
_SMALL = 1 << 20


class UnwaitedWorks:
    """Works that were dropped before a call of `wait` (see the module's docstring).

    Threads:
        Finalizers call `keep`, on any thread and at any point of a program.
    """

    def __init__(self) -> None:
        self._pending: deque[TorchWork] = deque()
        self._ended: deque[TorchWork] = deque(maxlen=_REMEMBERED)

    def keep(self, work: TorchWork) -> None:
        """Keep `work`, and check two older works for their end."""
        self._pending.append(work)
        for _ in range(2):
            try:
                oldest = self._pending.popleft()
            except IndexError:
                return
            if oldest.is_completed():
                oldest.drop_large_tensors()
                self._ended.append(oldest)
            else:
                self._pending.append(oldest)

    def clear(self) -> None:
        """Drop all works."""
        self._pending.clear()
        self._ended.clear()


class TorchWork(c10d.Work):
    """One of our `Work`s, as torch's.

    Args:
        work: Our work.
        unwaited: Keeps this work if it is dropped before a call of `wait`.
        waiters: The threads that set futures.
        limit: The default time limit of `wait`; None for the group's timeout.
        value: The value of the future; None for the list of outputs.

    Attributes:
        recorded: Set when the profiler has recorded the end; None without a profiler.

    Threads:
        Every method may be called from any thread.
    """

    def __init__(
        self,
        work: Work,
        unwaited: UnwaitedWorks,
        waiters: Waiters,
        limit: timedelta | None = None,
        value: object = None,
    ) -> None:
        super().__init__()
        self._work, self._unwaited, self._waiters = work, unwaited, waiters
        self._limit, self._value = limit, value
        self.recorded: threading.Event | None = None
        self._waited = False
        self._lock = threading.Lock()
        self._future: Any = None

    def __del__(self) -> None:
        if not self._waited:
            self._waited = True
            self._unwaited.keep(self)

    def drop_large_tensors(self) -> None:
        """Drop the tensors of a successful operation if they are large."""
        if self.is_success() and sum(t.nbytes for t in self._work.result()) > _SMALL:
            self._work, self._value = Work(None, []), None

    @opaque
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has ended; raise its error.

        Args:
            timeout: The time limit; None, zero or less for the default (C++ passes zero).
        """
        limit = timeout if timeout is not None and timeout > _NO_TIME else self._limit
        try:
            self._work.wait(limit)
        finally:
            if self.recorded is not None and self._work.is_completed():
                self.recorded.wait()
        self._waited = True
        return True

    def settle(self) -> None:
        """Wait for the end without raising the operation's error."""
        self._work.settle(None)

    def synchronize(self) -> None:
        """Make the results visible; on CPU the same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make the current stream wait; on CPU the same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return, without blocking, whether the operation has ended."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return whether the operation has succeeded."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return the error of a failed operation."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Return the outputs of a finished operation."""
        return self._work.result()

    def source_rank(self) -> int:
        """Return the sender's rank in the group."""
        return self._work.source_rank()

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the outputs without waiting; C++ sees its error, too."""
        with self._lock:
            if self._future is None:
                done: torch.futures.Future[None]
                done = torch.futures.Future(devices=[*self._work.devices])
                self._future = done.then(self._outcome)
                if self._work.is_completed():
                    done.set_result(None)
                else:
                    self._waiters.run(
                        lambda: (self._work.settle(None, aside=True), done.set_result(None))
                    )
        return self._future

    def _outcome(self, done: object) -> object:
        del done
        outputs = self._work.result()
        return outputs if self._value is None else self._value


_NO_TIME = timedelta(0)


class CompletedWork(TorchWork):
    """The work of an operation that ended before its call returned."""

    def __init__(self) -> None:
        super().__init__(Work(None, []), UnwaitedWorks(), Waiters())
        self._waited = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        del timeout
        return True
