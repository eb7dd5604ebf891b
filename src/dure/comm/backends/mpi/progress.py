"""The progress engine: how operations over MPI advance, wait, fail, and leave.

A *stage* is a list of MPI requests that run together. An operation is a generator of stages: when
all requests of one have ended it processes the data that arrived, and begins the next; it never
waits itself. A thread that waits for an operation *polls*: it tests the requests of the current
stage and, when all have ended, advances the operation. So no thread blocks inside MPI: a wait can
be interrupted, and has a limit.

* **Collectives** run one after another, in the order of the calls, which is the same on all ranks.
  They do not run on an `OrderedQueue` (backends/queue.py): MPI makes progress only while it is
  polled, so a waiting thread advances all operations itself. Waking another thread would take
  nearly as long as a small collective (docs/decisions/0010-foreign-engines.md).
* **Messages** are operations of one stage, independent of collectives and of each other.
* **Asynchronous operations** are polled by a helper thread while no other thread polls; it sleeps
  when there are none. If MPI allows only one thread, they advance when the program waits or polls.
* **Abort records.** A rank that leaves, or whose collective fails, sends all peers a message with
  the number of collectives that it completed: later ones will never run, and ranks that wait for
  one raise. No such messages are sent otherwise. Ranks check for them before a collective, before
  its data move, and regularly while they wait.

A communicator that was left is kept until the process ends: MPI cannot cancel a message to it, and
might deliver the message to the next group to which it gives the same number.

Threads:
    Every method, from any thread; `Library.lock` guards everything.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from dure.comm.backends.abort import AbortRecord, GroupState
from dure.comm.backends.header import Header
from dure.comm.backends.mpi.header import POLL, Stage
from dure.comm.backends.mpi.library import Library
from dure.comm.backends.request import Request
from dure.errors import Aborted, DureError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Operation", "ProgressEngine", "Steps"]

Steps = Generator[Stage, None, None]
"""The stages of an operation; the code between two of them processes the data that arrived."""

_LOOK_EVERY = 16
"""Polls between two checks for abort records: a check costs about as much as a poll."""

_SPIN = 5_000
"""Polls, of about a microsecond, before a waiting rank gives up its core.

Measured: docs/decisions/0010-foreign-engines.md.
"""

_YIELD = 20_000
"""Polls before it sleeps between them."""

_NAP_S = 5e-5
_LONG_NAP_S = 1e-3
_GRACE_S = 0.2
"""How long a message of a peer that left may take to arrive."""


class Operation(Request):
    """A pending collective or message: a generator that yields stages.

    Args:
        engine: Of the group.
        name: The operation's name in errors.
        steps: Its stages; None if they are set later.
        peer: The rank at the other end of a message; None for a collective, or for any rank.
        header: Of a collective.
    """

    __slots__ = ("began", "engine", "header", "name", "peer", "seq", "stage", "steps")

    def __init__(
        self,
        engine: ProgressEngine,
        name: str,
        steps: Steps | None,
        peer: int | None = None,
        header: Header | None = None,
    ) -> None:
        super().__init__()
        self.engine, self.name, self.peer = engine, name, peer
        self.steps, self.header = steps, header
        self.stage = Stage([], [])
        self.began = time.monotonic()
        self.seq: int | None = None

    def error_of(self, record: AbortRecord) -> DureError:
        """Make the error of this operation from a record."""
        return record.error(**self.engine.state.where(self.name, self.seq, self.began))

    def finish(self, record: AbortRecord | None) -> None:
        """End with the record's error, or successfully; release the tensors."""
        if self.end(None if record is None else self.error_of(record)):
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
        tag: Of abort records.
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
        self._library, self._comm, self._tag = library, comm, tag
        self._lock, self._testall = library.lock, library.MPI.Request.Testall
        self._any = library.MPI.ANY_SOURCE
        self.timeout_s = timeout_s
        self._spin = 0 if oversubscribed else _SPIN
        self._queue: deque[Operation] = deque()
        self._messages: list[Operation] = []
        self._left: dict[int, float] = {}  # ranks that left: when their records arrived
        self._num_started = self._num_completed = self._num_polls = 0
        self._busy = threading.Condition(self._lock)
        self._helper: threading.Thread | None = None

    # ---- beginning -------------------------------------------------------------------------------

    @property
    def head(self) -> Operation:
        """The collective that is running."""
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
            self._receive_records()
            peer = operation.peer
            if operation.name == "send" and peer is not None and peer in self._left:
                raise operation.error_of(AbortRecord.gone(peer))
            self._messages.append(operation)  # after earlier receives, which may match its message
            self._advance_messages()
            if async_op and not operation.ended:
                self._wake_helper()
        if not async_op:
            operation.wait()
        return operation

    def look(self, operation: Operation) -> None:
        """Raise if a collective will never run."""
        self._receive_records()
        if operation.seq is not None and self.state.ends(operation.seq):
            raise self.state.error(operation.name, operation.seq, operation.began)

    def _check_open(self, operation: Operation) -> None:
        if self.state.left.is_set():
            where = self.state.where(operation.name, operation.seq, operation.began)
            raise Aborted("this rank has left the group", **where)

    # ---- progress --------------------------------------------------------------------------------

    def wait(self, operation: Operation, limit: float | None) -> bool:
        """Poll until `operation` has ended; return False at `limit`."""
        num_polls = 0
        while True:
            with self._lock:
                if not operation.ended:
                    self._poll()
            if operation.ended:
                return True
            if limit is not None and time.monotonic() >= limit:
                return False
            num_polls += 1
            self._pause(num_polls)

    def _pause(self, num_polls: int) -> None:
        """Wait between polls: first not at all, then yield the core, then sleep."""
        if num_polls < self._spin:
            return
        if num_polls < _YIELD:
            os.sched_yield()
        else:
            time.sleep(_NAP_S if num_polls < 4 * _YIELD else _LONG_NAP_S)

    def poll(self) -> None:
        """Advance all operations, unless another thread is doing so."""
        if self._lock.acquire(blocking=False):
            try:
                self._poll()
            finally:
                self._lock.release()

    def _poll(self) -> None:
        self._num_polls += 1
        if not self._num_polls % _LOOK_EVERY and not self.state.left.is_set():
            self._receive_records()
        queue = self._queue
        while queue and self._advance(queue[0]):
            if queue:
                queue.popleft()
            if queue:
                queue[0].began = time.monotonic()  # its limit excludes the operations before it
        if self._messages:
            self._advance_messages()

    def _advance_messages(self) -> None:
        self._messages = [m for m in self._messages if not self._advance(m)]

    def _advance(self, operation: Operation) -> bool:
        """Advance an operation as far as possible; return whether it has ended."""
        if operation.ended:
            return True
        try:
            steps = operation.steps
            assert steps is not None
            stage = operation.stage
            while not stage.requests or self._testall(stage.requests):
                stage = operation.stage = next(steps)
                if stage is POLL:
                    break
        except StopIteration:
            if operation.seq is not None:
                self._num_completed += 1
            operation.finish(None)
        except DureError as error:
            self._fail(operation, AbortRecord.of(error))
        except self._library.MPI.Exception as error:
            self._fail(operation, self._translate(operation, error))
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
            failed = AbortRecord(kind="InternalError", what="a step failed", seen=seen)
            self._fail(operation, failed)
        except BaseException:
            rank = self.state.rank
            what = f"rank {rank} was interrupted"
            self._fail(operation, AbortRecord(kind="PeerLost", what=what, peer=rank))
            raise
        else:
            self._check_limits(operation)
        return operation.ended

    def _check_limits(self, operation: Operation) -> None:
        """End an operation that will never run, or whose time is up."""
        seq, record = operation.seq, self.state.record
        if record is not None and seq is not None and self.state.ends(seq):
            self._fail(operation, record)
        elif time.monotonic() - operation.began > self.timeout_s:
            self._expire(operation)
        elif self._left and operation.seq is None:
            self._check_sender(operation)

    def _expire(self, operation: Operation) -> None:
        """End an operation with a timeout that names the ranks for which its stage waits."""
        waits = zip(operation.stage.requests, operation.stage.peers, strict=True)
        missing = tuple(
            sorted({peer for request, peer in waits if peer >= 0 and not request.Test()})
        )
        message = operation.seq is None
        if message and operation.peer is not None:
            missing = (operation.peer,)
        seen, fix = f"missing {list(missing)}", "Check what the missing ranks do"
        if not (missing or message):  # MPI's own collectives do not report missing peers
            seen = "the missing ranks are not known, because this group does not compare calls"
            fix = "Leave out verify=False to have them named"
        record = AbortRecord(
            kind="CommTimeout",
            what="no message arrived in time" if message else "not all ranks called in time",
            missing=missing,
            seen=seen,
            fix=f"{fix}, or raise the group's timeout.",
        )
        self._fail(operation, record)

    def _check_sender(self, operation: Operation) -> None:
        """End a message whose other end has left, a moment after its record arrived."""
        before = time.monotonic() - _GRACE_S
        gone = [rank for rank, arrived in self._left.items() if arrived < before]
        awaited = range(self.state.size) if operation.peer is None else [operation.peer]
        awaited = [rank for rank in awaited if rank != self.state.rank]
        if awaited and all(rank in gone for rank in awaited):
            self._fail(operation, AbortRecord.gone(awaited[0]))

    def _wake_helper(self) -> None:
        if not self._library.threads:
            return
        if self._helper is None:
            name = f"dure-mpi-{self.state.name}"
            self._helper = threading.Thread(target=self._help, name=name, daemon=True)
            self._helper.start()
        self._busy.notify()

    def _help(self) -> None:
        """Run the helper thread: poll pending operations while no other thread polls."""
        seen: int | None = None
        while True:
            with self._lock:
                while not (self._queue or self._messages or self.state.left.is_set()):
                    self._busy.wait()
                    seen = None
                if self.state.left.is_set():
                    return
                others_poll = seen not in (None, self._num_polls)
                if seen == self._num_polls:
                    self._poll()
                seen = self._num_polls
            time.sleep(_LONG_NAP_S if others_poll else _NAP_S)

    # ---- failing ---------------------------------------------------------------------------------

    def _fail(self, operation: Operation, record: AbortRecord) -> None:
        """End an operation with `record`; after a collective also all later ones, on all ranks."""
        self._abandon(operation)
        operation.finish(record)
        if operation.seq is None:
            return
        record = msgspec.structs.replace(record, after=self._num_completed)
        if self.state.adopt(record):
            self._send_record(record)
        for later in self._queue:
            if not later.ended:
                later.finish(self.state.record)
        self._queue.clear()

    def _abandon(self, operation: Operation) -> None:
        """Cancel the receives of an operation, and keep the memory of other requests."""
        stage, mpi = operation.stage, self._library.MPI
        for request in stage.requests[: stage.num_receives]:
            with suppress(mpi.Exception):
                if request != mpi.REQUEST_NULL:
                    request.Cancel()
        with suppress(mpi.Exception):
            if not stage.requests or self._testall(stage.requests):
                return
        self._library.kept.append((stage, operation.steps))

    def _translate(self, operation: Operation, error: MPI.Exception) -> AbortRecord:
        if error.Get_error_class() == self._library.MPI.ERR_TRUNCATE:
            what = "a message does not match its receive"
            return AbortRecord(kind="Desync", what=what, peer=operation.peer)
        seen = error.Get_error_string()
        return AbortRecord(kind="InternalError", what="MPI failed", seen=seen)

    def _send_record(self, record: AbortRecord) -> None:
        """Send a record to all peers."""
        text = record.text().encode()
        rank, size = self.state.rank, self.state.size
        sent = [self._comm.Isend(text, r, self._tag) for r in range(size) if r != rank]
        if sent and not self._library.MPI.Request.Testall(sent):
            self._library.kept.append((sent, text))

    def _receive_records(self) -> None:
        """Receive the peers' records; usually there are none."""
        if not self._comm.Iprobe(self._any, self._tag):
            return
        status = self._library.MPI.Status()
        while self._comm.Iprobe(self._any, self._tag, status):
            peer = status.Get_source()
            text = bytearray(status.Get_count(self._library.MPI.BYTE))
            self._comm.Recv(text, peer, self._tag)
            record = AbortRecord.read(bytes(text))
            if record.kind == "PeerLost" and record.peer == peer:  # the sender left
                self._left[peer] = time.monotonic()
            self.state.adopt(record)

    # ---- leaving ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave: pending operations end with `Aborted`, and peers receive a record."""
        with self._lock:
            if self.state.left.is_set():
                return
            self.state.left.set()
            left = AbortRecord.gone(self.state.rank, self._num_completed)
            for operation in [*self._queue, *self._messages]:
                if not operation.ended:
                    self._abandon(operation)
                    operation.finish(left)
            self._queue.clear()
            self._messages.clear()
            self._send_record(left)
            self._library.kept.append(self._comm)
            self._busy.notify_all()
            helper = self._helper
        if helper is not None and helper is not threading.current_thread():
            helper.join()
