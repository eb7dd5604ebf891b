"""The progress engine: how operations over MPI go on, wait, fail, and leave.

A *stage* is a list of MPI requests that run together. An operation is a generator of stages: when
all requests of one have ended it goes on, works on what has arrived, and begins the next; it never
waits itself. Whoever waits for an operation *polls*: it tests the requests of the current stage
and, when all have ended, lets the operation go on. So nobody ever blocks inside MPI: a wait can be
interrupted, and has a limit.

* **Collectives** run one after another, in the order of the calls, on all ranks alike.
* **Messages** are operations of one stage, independent of collectives and of each other.
* **Asynchronous operations** are polled by a helper thread while nobody waits for them; it sleeps
  when there are none. Where MPI allows one thread only, they go on when the program waits or asks.
* **Abort records.** A rank that leaves, or whose collective fails, tells all peers in a message of
  its own, with the number of collectives that it completed: later ones will never take place, and
  all who wait for one raise. Nobody sends anything while all is well. They are looked for before a
  collective, before its data move, and now and then while a rank waits.

A communicator must not be freed while a message may be on its way to it. Each rank's last message
in a group is the record that it left; so a communicator is *retired* when its group is closed, and
freed when all peers have said that they left, which is looked for whenever a group comes or goes.
That of a group that failed, on whichever rank, is kept to the end: MPI cannot call off a send, and
a message that nobody has received would be taken for one of the next group that MPI gives the same
number.

Threads: every method, from any thread; `Library.lock` guards everything.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from dure.comm.backends.abort import AbortRecord, GroupState
from dure.comm.backends.mpi.header import Stage
from dure.comm.backends.mpi.library import Library
from dure.comm.backends.request import Request
from dure.comm.call import Fingerprint, call_site
from dure.errors import Aborted, CommTimeout, Desync, DureError, InternalError, PeerLost

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Operation", "ProgressEngine", "Retired", "Steps", "free_retired"]

Steps = Generator[Stage, None, None]
"""The stages of an operation; what runs between two of them works on what has arrived."""

_LOOK_EVERY = 16
"""Polls between two looks for abort records: a look costs about as much as a poll."""

_SPIN = 5_000
"""Polls, of about a microsecond, before a waiting rank gives up its core: see docs/log.md."""

_YIELD = 20_000
"""Polls before it sleeps between them."""

_NAP_S = 5e-5
_LONG_NAP_S = 1e-3
_GRACE_S = 0.2
"""How long a message of a peer that left may still be on its way."""


class Operation(Request):
    """A collective or a message on its way: a generator that yields stages.

    Args:
        engine: Where it runs.
        name: As users call it.
        steps: Its stages; None where they are yet to be set.
        peer: The rank at the other end of a message; None for a collective, or for anyone.
        fingerprint: Of a collective.
    """

    __slots__ = ("began", "engine", "fingerprint", "name", "peer", "seq", "site", "stage", "steps")

    def __init__(
        self,
        engine: ProgressEngine,
        name: str,
        steps: Steps | None,
        peer: int | None = None,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        super().__init__()
        self.engine, self.name, self.peer = engine, name, peer
        self.steps, self.fingerprint = steps, fingerprint
        self.stage = Stage([], [])
        self.began = time.monotonic()
        self.seq: int | None = None
        self.site = "" if fingerprint is None else call_site()

    def finish(self, error: DureError | None) -> None:
        """End, well or badly, and let the tensors go."""
        if self.end(error):
            self.steps = None

    def _poll(self) -> None:
        self.engine.poll()

    def _await(self, limit: float | None) -> bool:
        return self.engine.wait(self, limit)


class ProgressEngine:
    """The operations of one group on one rank.

    Args:
        library: MPI.
        comm: The group's communicator.
        name: The group's name.
        timeout_s: How long an operation may wait for its peers.
        tag: Which messages carry abort records.
        oversubscribed: More ranks than cores share this host: do not spin.
    """

    def __init__(
        self,
        library: Library,
        comm: MPI.Intracomm,
        name: str,
        timeout_s: float,
        tag: int,
        oversubscribed: bool,
    ) -> None:
        self.state = GroupState(name, comm.Get_rank(), comm.Get_size())
        self._library = library
        self._aborts = AbortMessages(library, comm, self.state, tag)
        self._lock, self._testall = library.lock, library.MPI.Request.Testall
        self.timeout_s = timeout_s
        self._spin = 0 if oversubscribed else _SPIN
        self._queue: deque[Operation] = deque()
        self._messages: list[Operation] = []
        self._num_started = self._num_completed = self._num_polls = 0
        self._closed = self._failed = False
        self._waiters = 0
        self._busy = threading.Condition(self._lock)
        self._helper: threading.Thread | None = None

    # ---- beginning -------------------------------------------------------------------------------

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
            self._aborts.hear()
            if operation.name == "send" and operation.peer in self._aborts.left:
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
        self._aborts.hear()
        if self._ends(operation):
            raise self._broken(operation)

    def _check_open(self, operation: Operation) -> None:
        if self._closed:
            raise self._error(Aborted, "this rank has left the group", operation)

    # ---- progress --------------------------------------------------------------------------------

    def wait(self, operation: Operation, limit: float | None) -> bool:
        """Poll until `operation` has ended; False if it is `limit` first."""
        with self._lock:
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
            with self._lock:
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
            self._aborts.hear()
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
            operation.finish(None)
        except DureError as error:
            self._fail(operation, error if error.op else self._placed(error, operation))
        except self._library.MPI.Exception as error:
            self._fail(operation, self._translate(operation, error))
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
            self._fail(operation, self._error(InternalError, "a step failed", operation, seen=seen))
        except BaseException:
            what = f"rank {self.state.rank} was interrupted"
            told = self._error(PeerLost, what, operation, peer=self.state.rank)
            self._fail(operation, self._error(Aborted, "interrupted", operation), told)
            raise
        else:
            self._check_hope(operation)
        return operation.ended

    def _check_hope(self, operation: Operation) -> None:
        """End an operation that will never take place, or whose time is up."""
        if self._ends(operation):
            self._fail(operation, self._broken(operation))
        elif time.monotonic() - operation.began > self.timeout_s:
            self._expire(operation)
        elif self._aborts.left and operation.seq is None:
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
        others, left = self.state.size - 1, self._aborts.left
        peers = [operation.peer] if operation.peer is not None else list(left)
        gone = [p for p in peers if time.monotonic() - left.get(p, math.inf) > _GRACE_S]
        if len(gone) == (1 if operation.peer is not None else others):
            self._fail(operation, self._lost(operation, gone[0]))

    def _lost(self, operation: Operation, peer: int) -> DureError:
        return self._error(PeerLost, f"rank {peer} left the group", operation, peer=peer)

    # ---- failing ---------------------------------------------------------------------------------

    def _fail(self, operation: Operation, error: DureError, told: DureError | None = None) -> None:
        """End an operation with `error`; a collective takes all later ones with it.

        Peers raise the same, or what they are `told`.
        """
        self._abandon(operation)
        operation.finish(error)
        if operation.seq is None:
            return
        self._failed = True
        self._aborts.fail(AbortRecord.of(told or error, self._num_completed))
        for later in self._queue:
            if not later.ended:
                later.finish(self._broken(later))
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

    def _ends(self, operation: Operation) -> bool:
        """Tell whether a collective will never take place; a message always can."""
        return operation.seq is not None and self.state.ends(operation.seq)

    def _broken(self, operation: Operation) -> DureError:
        return self.state.error(operation.name, operation.seq, operation.began)

    def _error(
        self, kind: type[DureError], what: str, operation: Operation, **fields: Any
    ) -> DureError:
        where = self.state.where(operation.name, operation.seq, operation.began)
        return kind(what, **where, **fields)

    def _placed(self, error: DureError, operation: Operation) -> DureError:
        """Return the error of a step with where it happened."""
        where = self.state.where(operation.name, operation.seq, operation.began)
        return AbortRecord.of(error).error(**where)

    def _translate(self, operation: Operation, error: MPI.Exception) -> DureError:
        mpi, statuses = self._library.MPI, operation.stage.statuses or ()
        codes = [error.Get_error_code(), *(status.Get_error() for status in statuses)]
        if mpi.ERR_TRUNCATE in map(mpi.Get_error_class, codes):
            what = "a message does not fit the tensor it is received into"
            return self._error(Desync, what, operation, peer=operation.peer)
        return self._error(InternalError, "MPI failed", operation, seen=error.Get_error_string())

    # ---- helping ---------------------------------------------------------------------------------

    def _wake_helper(self) -> None:
        if not self._library.threads:
            return
        if self._helper is None:
            name = f"dure-mpi-{self.state.name}"
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

    # ---- leaving ---------------------------------------------------------------------------------

    def still_there(self) -> set[int]:
        """Return the peers that have not said that they left."""
        return set(range(self.state.size)) - {self.state.rank} - set(self._aborts.left)

    def close(self) -> bool:
        """Leave: what is pending ends with `Aborted`, and peers are told.

        Returns:
            Whether the group ended in good order, so that its communicator can be retired.
        """
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self.state.left.set()
            pending = [o for o in [*self._queue, *self._messages] if not o.ended]
            for operation in pending:
                self._abandon(operation)
                what = "the group was left while the operation was pending"
                operation.finish(self._error(Aborted, what, operation))
            self._queue.clear()
            self._messages.clear()
            clean = not pending and not self._failed
            self._aborts.hear()
            clean = clean and self._aborts.all_clean
            self._aborts.leave(self._num_completed, clean)
            self._busy.notify_all()
            helper = self._helper
        if helper is not None and helper is not threading.current_thread():
            helper.join()
        return clean


class AbortMessages:
    """What the ranks of one group tell each other of who left and what failed, on one rank.

    Args:
        library: MPI; its lock is held during every call.
        comm: The group's communicator.
        state: What is known of the group.
        tag: Which messages carry abort records.
    """

    def __init__(self, library: Library, comm: MPI.Intracomm, state: GroupState, tag: int) -> None:
        self._library, self._comm, self._state, self._tag = library, comm, state, tag
        self._any = library.MPI.ANY_SOURCE
        self.left: dict[int, float] = {}
        """Which ranks left, and when we heard of it."""
        self.all_clean = True
        """Whether those that left have left nothing behind."""

    def fail(self, record: AbortRecord) -> None:
        """A collective failed here, so there will be no more; tell all who do not know."""
        if self._state.adopt(record):
            self._tell(_Told(record))

    def leave(self, num_completed: int, clean: bool) -> None:
        """Tell all that this rank has left, and whether it leaves nothing behind."""
        rank = self._state.rank
        what = f"rank {rank} left the group"
        record = AbortRecord(kind="PeerLost", what=what, peer=rank, after=num_completed)
        self._tell(_Told(record, left=True, clean=clean))

    def hear(self) -> None:
        """Take what records have come; most often there are none."""
        if not self._comm.Iprobe(self._any, self._tag):
            return
        for peer, told in _heard(self._library, self._comm, self._tag):
            if told.left:
                self.left[peer] = time.monotonic()
                self.all_clean = self.all_clean and told.clean
            self._state.adopt(told.record)

    def _tell(self, told: _Told) -> None:
        text = msgspec.msgpack.encode(told)
        rank, size = self._state.rank, self._state.size
        sent = [self._comm.Isend(text, r, self._tag) for r in range(size) if r != rank]
        if sent and not self._library.MPI.Request.Testall(sent):
            self._library.kept.append((sent, text))


class _Told(msgspec.Struct, array_like=True):
    """What travels: the record, and whether its sender leaves with it.

    `clean` says of one that leaves that all it has sent is received.
    """

    record: AbortRecord
    left: bool = False
    clean: bool = True


class Retired:
    """The communicator of a group that this rank left in good order.

    Args:
        comm: It.
        tag: Which messages are abort records.
        still_there: The peers that have not said that they left.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int, still_there: set[int]) -> None:
        self.comm, self.tag, self.still_there = comm, tag, still_there
        self.clean = True


def free_retired(library: Library) -> None:
    """Free the communicators that nobody can write to any more; the lock is held."""
    for old in list(library.retired):
        for peer, told in _heard(library, old.comm, old.tag):
            if told.left:
                old.still_there.discard(peer)
                old.clean = old.clean and told.clean
        if not old.still_there and not old.clean:
            library.retired.remove(old)
            library.kept.append(old.comm)
        elif not old.still_there:
            library.retired.remove(old)
            old.comm.Free()


def _heard(
    library: Library, comm: MPI.Intracomm, tag: int
) -> Generator[tuple[int, _Told], None, None]:
    """Yield the abort records that have come on `comm`, and who sent them."""
    mpi = library.MPI
    status = mpi.Status()
    while comm.Iprobe(mpi.ANY_SOURCE, tag, status):
        peer = status.Get_source()
        text = bytearray(status.Get_count(mpi.BYTE))
        comm.Recv(text, peer, tag)
        yield peer, msgspec.msgpack.decode(text, type=_Told)
