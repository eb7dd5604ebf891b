"""`Work`: an operation that was started and can be waited for."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.backends.request import Request, current_stream
from dure.comm.checks import duration
from dure.comm.futures import Later, collected, waiters
from dure.comm.profiling import profiler, waiting
from dure.errors import CommTimeout, UnwaitedWorkWarning

if TYPE_CHECKING:
    from dure.comm.group.core import GroupCore


_warned: set[str] = set()
"""Lines of the program that were warned because they dropped work."""


class Work:
    """An operation that was started with ``async_op=True``.

    States: *pending*, then permanently *succeeded* or *failed*. The tensors of the call belong to
    the operation until it has ended: do not write inputs, do not read outputs. The work keeps them
    alive.

    Threads:
        Every method may be called from any thread at any time. Results that need a copy (a
        non-contiguous output) are in place once any of `wait`, `is_completed` or a future's
        callback has reported the end.

    Work that is dropped before the program has waited for it is reported by an
    `UnwaitedWorkWarning`, once per line of the program.

    Example:
        ```python
        gradient = torch.ones(4)
        work = dist.all_reduce(gradient, async_op=True)
        other = torch.ones(4).sum()  # runs while the ranks communicate
        work.wait()
        assert gradient.tolist() == [2.0] * 4  # on 2 ranks
        ```
    """

    site = ""
    """Line of the program that called; "" if the request has it."""
    keep: object = None
    """Objects to keep alive until the end."""
    _error: Exception | None = None
    _group: GroupCore | None = None
    _future: torch.futures.Future[list[torch.Tensor]] | None = None
    _ended = False
    _event: Any = None
    """If streams order the operation: recorded after the first wait (see `_order`)."""
    _asked = False  # whether the program has waited for it or asked for its state

    def __init__(
        self,
        request: Request | None,
        outputs: list[torch.Tensor],
        op: str = "",
        seq: int = 0,
        group: GroupCore | None = None,
        *,
        finish: Callable[[], None] | None = None,
        settled: Callable[[Exception | None], object] | None = None,
    ) -> None:
        self._request, self._outputs = request, outputs
        self._op, self._seq, self._group = op, seq, group
        self._finish, self._settled = finish, settled
        self._lock = threading.Lock()
        if request is None:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        """Copy results back, release the inputs, and notify listeners; called once, with the lock.

        `_finish` is cleared after it has run: a thread that finds it cleared may return.
        """
        self.keep = None
        if error is None and self._finish is not None:
            try:
                self._finish()
            except Exception as e:  # results are not in place: every wait raises
                error = e
        self._error = error
        self._finish = None
        self._record()
        self._ended = True
        if self._settled is not None:
            self._settled(error)
        elif error is not None and self._group is not None:
            self._group.note_error(error)

    @property
    def stream_device(self) -> torch.device | None:
        """See `Request.stream_device`; the engine's own requests have none."""
        return getattr(self._request, "stream_device", None)

    def _record(self) -> None:
        """Record an event in the current stream, which waits for the operation by now."""
        device = self.stream_device
        if device is not None:
            self._event = current_stream(device).record_event()

    def _order(self) -> None:
        """Let the current stream wait, too: the stream that waited first may be another one."""
        if self._event is not None:
            device = self.stream_device
            assert device is not None
            current_stream(device).wait_event(self._event)

    def disown(self) -> None:
        """Let it be dropped without a warning."""
        self._asked = True

    def drop_outputs(self) -> None:
        """Release the output tensors, which refer to this work."""
        self._outputs = []
        if isinstance(self._request, _AllOf):
            self._request.drop_outputs()

    def __del__(self) -> None:
        """Warn, once for each line of the program, of work that was not waited for."""
        if self._asked or self._group is None or sys.is_finalizing():
            return
        assert self._request is not None
        site: str = self.site or self._request.site  # pyright: ignore
        if site in _warned:
            return
        _warned.add(site)
        file, _, line = site.partition(" in ")[0].rpartition(":")
        warnings.warn_explicit(
            f"the Work of {self._op}(..., async_op=True) was dropped before it was waited for, so "
            "the program cannot know when it finished or whether it failed. Keep it, and call "
            "wait().",
            UnwaitedWorkWarning,
            file,
            int(line) if line.isdecimal() else 0,
        )

    def settle(self, timeout_s: float | None, aside: bool = False) -> bool:
        """Wait for the end without raising its error; return False if `timeout_s` passed first.

        `aside`: on a helper thread, without spinning and without a limit.
        """
        self._asked = True
        if self._ended:
            self._order()
            return True
        request = self._request
        assert request is not None
        error: Exception | None = None
        try:
            if aside:
                request.wait_aside()
            elif not request.wait(timeout_s):
                return False
        except Exception as e:
            error = e
        if error is None and self._finish is self._settled is self.stream_device is None:
            self._ended, self.keep = True, None
            return True
        with self._lock:
            if not self._ended:
                self._end(error)
            else:
                self._order()
        return True

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the operation has ended.

        Args:
            timeout: How long to wait, as a timedelta or in seconds; None and zero mean no limit
                except the group's timeout, which always applies.

        Returns:
            True.

        Raises:
            UsageError: `timeout` is neither a timedelta nor a number.
            CommTimeout: `timeout` passed; the operation continues, and `wait` can be called again.
            CommError: The operation failed; the same error at every call.
        """
        limit = None if timeout is None else _limit_of(timeout)
        if profiler._is_profiler_enabled and not self._ended:
            with waiting(self._op or "several"):
                ended = self.settle(limit)
        else:
            ended = self.settle(limit)
        if not ended:
            group = self._group
            raise CommTimeout(
                "the operation did not end in the time given to wait()",
                elapsed_s=limit,
                fix="Wait again, or give a longer timeout.",
                op=self._op or None,
                seq=self._seq or None,
                group=None if group is None else group.group_name,
                rank=None if group is None else group.rank(),
            )
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return, without blocking, whether the operation has ended, successfully or not."""
        self._asked = True
        if self._ended:
            self._order()
        elif self._request is not None and self._request.done():
            self.settle(None)
        return self._ended

    def is_success(self) -> bool:
        """Return whether the operation has succeeded."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error of an operation that failed; None while pending or after a success."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors (of a finished operation)."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        """Make the results visible to the caller; on CPU the same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make the current stream wait; on CPU the same as `wait`."""
        self.synchronize()

    def source_rank(self) -> int:
        """Return the global rank that a finished receive came from; -1 for other operations."""
        source = self._request.source if self._request is not None else -1
        return source if source < 0 or self._group is None else self._group.global_ranks[source]

    _source_rank = source_rank  # the name under which torch has it

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the output tensors; it is set when the operation ends.

        Cost:
            A helper thread that waits; inside a communication hook of DDP none, and callbacks run
            in the order in which DDP waits (comm/futures.py).
        """
        self._asked = True
        with self._lock:
            if self._future is None:
                self._future = collected(self._later) or self._awaited()
        return self._future

    def get_future_result(self) -> torch.futures.Future[int]:
        """Return a future of the operation's result, as torch numbers it.

        0: success; 1: a timeout; 2: another error. The future itself has no error.
        """
        return self.get_future().then(lambda done: self._result_number())

    def _result_number(self) -> int:
        error = self.exception()
        return 0 if error is None else 1 if isinstance(error, CommTimeout) else 2

    @property
    def devices(self) -> list[torch.device]:
        """The accelerators that the outputs are on."""
        names = sorted({str(t.device) for t in self._outputs if t.device.type != "cpu"})
        return [torch.device(name) for name in names]

    def _later(self) -> Later:
        return Later(self.result, self.is_completed, self.devices)

    def _awaited(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Make a future that a thread sets; called with the lock held."""
        future: torch.futures.Future[list[torch.Tensor]]
        future = torch.futures.Future(devices=[*self.devices])
        if self._ended:
            self._order()
            self._set_future(future)
        else:
            waiters.run(lambda: (self.settle(None, aside=True), self._set_future(future)))
        return future

    def _set_future(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if isinstance(self._error, Exception):
            future.set_exception(self._error)  # pyright: ignore[reportArgumentType]
        else:
            future.set_result(self._outputs)


def _limit_of(timeout: timedelta | float) -> float | None:
    """Return a limit in seconds; None if there is none."""
    return duration(timeout, "Work.wait").total_seconds() or None


class _AllOf(Request):
    """The request of several works: ended when every one of them has."""

    __slots__ = ("_works", "stream_device")

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works
        devices = [w.stream_device for w in works if w.stream_device is not None]
        self.stream_device = devices[0] if devices else None

    def drop_outputs(self) -> None:
        """See `Work.drop_outputs`."""
        for work in self._works:
            work.drop_outputs()

    def wait_aside(self) -> None:
        """See `Request.wait_aside`."""
        for work in self._works:
            work.settle(None, aside=True)
        self.wait()

    def _poll(self) -> None:
        if all(w.is_completed() for w in self._works):
            self._await(None)

    def _await(self, limit: float | None) -> bool:
        for work in self._works:
            left_s = None if limit is None else max(limit - time.monotonic(), 0.0)
            if not work.settle(left_s):
                return False
        errors = [e for e in (work.exception() for work in self._works) if e is not None]
        self.end(errors[0] if errors else None)
        return True


def combine(
    works: Sequence[Work],
    outputs: list[torch.Tensor],
    async_op: bool,
    *,
    finish: Callable[[], None] | None = None,
) -> Work | None:
    """Return one `Work` for several; unless `async_op`, wait for it and return None."""
    for part in works:
        part.disown()
    work = Work(_AllOf(works), outputs, finish=finish)
    if async_op:
        return work
    work.wait()
    return None
