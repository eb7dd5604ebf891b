"""The lane: how operations over MPI make progress, wait, fail, and leave.

Whoever waits for an operation (`mpi.operation`) *polls*: it tests the requests of the current stage
and, when all have ended, lets the operation go on to the next. So nobody ever blocks inside MPI: a
wait can be interrupted, and has a limit.

* **Collectives** run one after another, in the order of the calls, on all ranks alike.
* **Messages** are operations of one stage, independent of collectives and of each other.
* **Asynchronous operations** are polled by a helper thread while nobody waits for them; it sleeps
  when there are none. Where MPI allows one thread only, they go on when the program waits or asks.
* **Verdicts** (see `mpi.verdicts`) are looked for before a collective, before its data move, and
  now and then while a rank waits.

Threads: every method, from any thread; `Library.lock` guards everything.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dure.comm.backends.mpi.library import Library
from dure.comm.backends.mpi.operation import Operation
from dure.comm.backends.mpi.verdicts import Verdicts
from dure.errors import Aborted, CommTimeout, Desync, DureError, InternalError, PeerLost

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Lane"]

_LOOK_EVERY = 16
"""Polls between two looks for verdicts: a look costs about as much as a poll."""

_SPIN = 5_000
"""Polls, of about a microsecond, before a waiting rank gives up its core: see docs/log.md."""

_YIELD = 20_000
"""Polls before it sleeps between them."""

_NAP_S = 5e-5
_LONG_NAP_S = 1e-3
_GRACE_S = 0.2
"""How long a message of a peer that left may still be on its way."""


class Lane:
    """The operations of one group on one rank.

    Args:
        library: MPI.
        comm: The group's communicator.
        name: The group's name.
        timeout_s: How long an operation may wait for its peers.
        tag: Which messages are verdicts.
        crowded: More ranks than cores share this host: do not spin.
    """

    def __init__(
        self,
        library: Library,
        comm: MPI.Intracomm,
        name: str,
        timeout_s: float,
        tag: int,
        crowded: bool,
    ) -> None:
        self._library, self._verdicts = library, Verdicts(library, comm, tag)
        self._lock, self._testall = library.lock, library.MPI.Request.Testall
        self.name, self.timeout_s = name, timeout_s
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._spin = 0 if crowded else _SPIN
        self._queue: deque[Operation] = deque()
        self._messages: list[Operation] = []
        self._num_started = self._num_completed = self._num_polls = 0
        self._closed = self._failed = False
        self._waiters = 0
        self._busy = threading.Condition(self._lock)
        self._helper: threading.Thread | None = None

    # Beginning ----------------------------------------------------------------------------------

    @property
    def head(self) -> Operation:
        """The collective that is running; its steps may ask."""
        return self._queue[0]

    def collective(self, operation: Operation, async_op: bool) -> Operation | None:
        """Begin the next collective; return it if it is asynchronous, else wait for it.

        Raises:
            CommError: The group has failed, or was left; then nothing is sent.
        """
        with self._lock:
            self._check_open(operation)
            operation.seq = self._num_started
            self.look(operation)
            self._num_started += 1
            self._queue.append(operation)
            if async_op:
                self._wake_helper()
            self._poll()
        if async_op:
            return operation
        operation.wait()
        return None

    def message(self, operation: Operation, async_op: bool) -> Operation:
        """Begin a message, and wait for it unless it is asynchronous."""
        with self._lock:
            self._check_open(operation)
            self._verdicts.hear()
            if operation.name == "send" and operation.peer in self._verdicts.left:
                raise self._lost(operation, operation.peer)
            if not self._advance(operation):
                self._messages.append(operation)
                if async_op:
                    self._wake_helper()
        if not async_op:
            operation.wait()
        return operation

    def look(self, operation: Operation) -> None:
        """Raise if `operation` will never take place."""
        self._verdicts.hear()
        if self._verdicts.ends(operation.seq):
            raise self._verdicts.error(self._where(operation))

    def _check_open(self, operation: Operation) -> None:
        if self._closed:
            raise self._error(Aborted, "this rank has left the group", operation)

    # Progress -----------------------------------------------------------------------------------

    def wait(self, operation: Operation, timeout_s: float | None) -> bool:
        """Poll until `operation` has ended; False if `timeout_s` passed first."""
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        self._waiters += 1
        try:
            num_polls = 0
            while not operation.ended:
                with self._lock:
                    self._poll()
                if operation.ended:
                    break
                if limit is not None and time.monotonic() >= limit:
                    return False
                num_polls += 1
                self._pause(num_polls)
        finally:
            self._waiters -= 1
        return True

    def _pause(self, num_polls: int) -> None:
        """Wait a moment: not at all at first, then give up the core, then sleep."""
        if num_polls < self._spin:
            return
        if num_polls < _YIELD:
            os.sched_yield()
        else:
            time.sleep(_NAP_S if num_polls < 4 * _YIELD else _LONG_NAP_S)

    def poll(self) -> None:
        """Make what progress there is, unless another thread does so right now."""
        if self._lock.acquire(blocking=False):
            try:
                self._poll()
            finally:
                self._lock.release()

    def _poll(self) -> None:
        self._num_polls += 1
        if not self._num_polls % _LOOK_EVERY and not self._closed:
            self._verdicts.hear()
        queue = self._queue
        while queue and self._advance(queue[0]):
            if queue:
                queue.popleft()
            if queue:
                queue[0].began = time.monotonic()  # its time is its own, not that of those before
        if self._messages:
            self._messages = [m for m in self._messages if not self._advance(m)]

    def _advance(self, operation: Operation) -> bool:
        """Let an operation go as far as it can; True if it has ended."""
        if operation.ended:
            return True
        try:
            steps = operation.steps
            assert steps is not None
            stage = operation.stage
            while not stage.requests or self._testall(stage.requests, stage.statuses):
                stage = operation.stage = next(steps)
        except StopIteration:
            if operation.seq is not None:
                self._num_completed += 1
            operation.end(None)
        except DureError as error:
            self._fail(operation, error if error.op else self._placed(error, operation))
        except self._library.MPI.Exception as error:
            self._fail(operation, self._translate(operation, error))
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
            self._fail(operation, self._error(InternalError, "a step failed", operation, seen=seen))
        except BaseException:
            what = f"rank {self.rank} was interrupted"
            told = self._error(PeerLost, what, operation, peer=self.rank)
            self._fail(operation, self._error(Aborted, "interrupted", operation), told)
            raise
        else:
            self._check_hope(operation)
        return operation.ended

    def _check_hope(self, operation: Operation) -> None:
        """End an operation that will never take place, or whose time is up."""
        if self._verdicts.ends(operation.seq):
            self._fail(operation, self._verdicts.error(self._where(operation)))
        elif time.monotonic() - operation.began > self.timeout_s:
            self._expire(operation)
        elif self._verdicts.left and operation.seq is None:
            self._check_sender(operation)

    def _expire(self, operation: Operation) -> None:
        missing = self._missing(operation)
        error = self._error(
            CommTimeout,
            "not all ranks called in time" if operation.seq is not None else "no peer came in time",
            operation,
            missing=missing,
            seen=f"missing {list(missing)}",
            fix="See what the missing ranks do, or raise the group's timeout.",
        )
        self._fail(operation, error)

    def _missing(self, operation: Operation) -> tuple[int, ...]:
        """Return the ranks that the current stage still waits for."""
        waits = zip(operation.stage.requests, operation.stage.peers, strict=True)
        return tuple(sorted({peer for request, peer in waits if peer >= 0 and not request.Test()}))

    def _check_sender(self, operation: Operation) -> None:
        """End a message whose other end has left, a moment after we heard of it."""
        others, left = self.size - 1, self._verdicts.left
        peers = [operation.peer] if operation.peer is not None else list(left)
        gone = [p for p in peers if time.monotonic() - left.get(p, math.inf) > _GRACE_S]
        if len(gone) == (1 if operation.peer is not None else others):
            self._fail(operation, self._lost(operation, gone[0]))

    def _lost(self, operation: Operation, peer: int) -> DureError:
        return self._error(PeerLost, f"rank {peer} left the group", operation, peer=peer)

    # Failing ------------------------------------------------------------------------------------

    def _fail(self, operation: Operation, error: DureError, told: DureError | None = None) -> None:
        """End an operation with `error`; a collective takes all later ones with it.

        Peers raise the same, or what they are `told`.
        """
        self._abandon(operation)
        operation.end(error)
        if operation.seq is None:
            return
        self._failed = True
        self._verdicts.fail(told or error, self._num_completed)
        for later in self._queue:
            if not later.ended:
                later.end(self._verdicts.error(self._where(later)))
        self._queue.clear()

    def _abandon(self, operation: Operation) -> None:
        """Call off what can be called off, and keep the memory of what cannot."""
        stage, mpi = operation.stage, self._library.MPI
        for request in stage.requests[: stage.num_receives]:
            with suppress(mpi.Exception):
                if request != mpi.REQUEST_NULL:
                    request.Cancel()
        with suppress(mpi.Exception):
            if not stage.requests or self._testall(stage.requests):
                return
        self._library.kept.append((stage, operation.steps))

    def _where(self, operation: Operation) -> dict[str, Any]:
        return {
            "group": self.name,
            "op": operation.name,
            "seq": operation.seq,
            "rank": self.rank,
            "world_size": self.size,
            "elapsed_s": time.monotonic() - operation.began,
        }

    def _error(
        self, kind: type[DureError], what: str, operation: Operation, **fields: Any
    ) -> DureError:
        return kind(what, **self._where(operation), **fields)

    def _placed(self, error: DureError, operation: Operation) -> DureError:
        """Return the error of a step with where it happened."""
        fields: dict[str, Any] = {"peer": error.peer, "seen": error.seen, "fix": error.fix}
        if isinstance(error, Desync):
            fields["calls"] = error.calls
        return self._error(type(error), error.what, operation, **fields)

    def _translate(self, operation: Operation, error: MPI.Exception) -> DureError:
        mpi, statuses = self._library.MPI, operation.stage.statuses or ()
        codes = [error.Get_error_code(), *(status.Get_error() for status in statuses)]
        if mpi.ERR_TRUNCATE in map(mpi.Get_error_class, codes):
            what = "a message does not fit the tensor it is received into"
            return self._error(Desync, what, operation, peer=operation.peer)
        return self._error(InternalError, "MPI failed", operation, seen=error.Get_error_string())

    # Helping ------------------------------------------------------------------------------------

    def _wake_helper(self) -> None:
        if not self._library.threads:
            return
        if self._helper is None:
            name = f"dure-mpi-{self.name}"
            self._helper = threading.Thread(target=self._help, name=name, daemon=True)
            self._helper.start()
        self._busy.notify()

    def _help(self) -> None:
        """Poll while there is something to do and nobody else does."""
        while True:
            with self._lock:
                while not (self._queue or self._messages or self._closed):
                    self._busy.wait()
                if self._closed:
                    return
                if not self._waiters:
                    self._poll()
            time.sleep(_LONG_NAP_S if self._waiters else _NAP_S)

    # Leaving ------------------------------------------------------------------------------------

    def still_there(self) -> set[int]:
        """Return the peers that have not said that they left."""
        return set(range(self.size)) - {self.rank} - set(self._verdicts.left)

    def close(self) -> bool:
        """Leave: what is pending ends with `Aborted`, and peers are told.

        Returns:
            Whether the group ended in good order, so that its communicator can be retired.
        """
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            pending = [o for o in [*self._queue, *self._messages] if not o.ended]
            for operation in pending:
                self._abandon(operation)
                what = "the group was left while the operation was pending"
                operation.end(self._error(Aborted, what, operation))
            self._queue.clear()
            self._messages.clear()
            clean = not pending and not self._failed
            self._verdicts.leave(self.rank, self._num_completed)
            self._busy.notify_all()
            helper = self._helper
        if helper is not None and helper is not threading.current_thread():
            helper.join()
        return clean
