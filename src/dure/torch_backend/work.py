"""A pending operation, as torch.distributed and the C++ behind it want to see one.

**What C++ makes of a Python `Work`.** When C++ code (DDP's reducer, a functional collective) holds
a work that Python code gave it, the Python half of the object can die while the C++ half lives on;
its `wait` is then the base class's, which waits for something that never comes. So a work that is
dropped before anybody waited for it is not let go: its finaliser hands it to a `Keeper`, which
keeps it until it has ended, and then until some more have ended after it (without its tensors, if
they are large).

**Errors in futures.** An error that Python sets on a future cannot be seen by C++, which goes on as
if the operation had succeeded. An error raised inside a callback can. So `get_future` returns the
outcome of a callback that raises where the operation failed.

**Who waits.** A future is set by a thread that waits for the operation (`Waiters` of
comm/futures.py): `get_future` returns at once, and the engine moves data without anyone waiting.
"""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from dure.comm.futures import Waiters
from dure.comm.work import Work
from dure.torch_backend.compiling import opaque

__all__ = ["Finished", "Keeper", "TorchWork"]

_REMEMBERED = 64
_SMALL = 1 << 20


class Keeper:
    """Where works stay that were dropped before anybody waited for them (see the module's text).

    Threads: `keep` is called by finalisers, on any thread and at any point of a program.
    """

    def __init__(self) -> None:
        self._pending: deque[TorchWork] = deque()
        self._ended: deque[TorchWork] = deque(maxlen=_REMEMBERED)

    def keep(self, work: TorchWork) -> None:
        """Keep `work`; look whether two of those kept before have ended."""
        self._pending.append(work)
        for _ in range(2):
            try:
                oldest = self._pending.popleft()
            except IndexError:
                return
            if oldest.is_completed():
                oldest.let_go()
                self._ended.append(oldest)
            else:
                self._pending.append(oldest)

    def clear(self) -> None:
        """Forget all."""
        self._pending.clear()
        self._ended.clear()


class TorchWork(c10d.Work):
    """One of our `Work`s, as torch's.

    Args:
        work: Ours.
        keeper: Where this one goes if it is dropped unwaited.
        waiters: Who sets futures.
        limit: How long `wait` waits where its caller sets no limit; None for no limit but the
            group's.
        value: What the future holds, if not the list of outputs.

    Attributes:
        recorded: Set when a profile has noted the end, if one is taken.

    Threads: every method may be called from any thread.
    """

    def __init__(
        self,
        work: Work,
        keeper: Keeper,
        waiters: Waiters,
        limit: timedelta | None = None,
        value: object = None,
    ) -> None:
        super().__init__()
        self._work, self._keeper, self._waiters = work, keeper, waiters
        self._limit, self._value = limit, value
        self.recorded: threading.Event | None = None
        self._waited = False
        self._lock = threading.Lock()
        self._future: Any = None

    def __del__(self) -> None:
        if not self._waited:
            self._waited = True
            self._keeper.keep(self)

    def let_go(self) -> None:
        """Drop the tensors of an operation that has ended, if they are large."""
        if self.is_success() and sum(t.nbytes for t in self._work.result()) > _SMALL:
            self._work, self._value = Work(None, []), None

    @opaque
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has ended; raise its error.

        Args:
            timeout: None, zero or less: no limit but the group's (C++ passes zero for that).
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
        """Tell, without blocking, whether the operation has ended."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Tell whether the operation has ended well."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return the error of an operation that failed."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Return the outputs of a finished operation."""
        return self._work.result()

    def source_rank(self) -> int:
        """Return who sent what was received, as a rank of the group."""
        return self._work.source_rank()

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the outputs, at once; C++ sees its error too."""
        with self._lock:
            if self._future is None:
                done: torch.futures.Future[None] = torch.futures.Future()
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


class Finished(c10d.Work):
    """What a call returns that was done when it returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        del timeout
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def block_current_stream(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Tell that it has ended."""
        return True

    def is_success(self) -> bool:
        """Tell that it ended well."""
        return True

    def exception(self) -> None:
        """Return None: an operation that fails at once raises at once."""

    def result(self) -> list[torch.Tensor]:
        """Return nothing: the outputs are where the caller put them."""
        return []

    def get_future(self) -> Any:
        """Return a future that is set."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future
