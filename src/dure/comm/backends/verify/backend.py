"""Verification of a foreign engine's collectives: the ranks compare their calls before data move.

Our own backends compare calls as part of meeting; an engine such as Gloo does not, and answers a
mismatch with wrong numbers, an abort or a hang. `VerifyingBackend` stands before any backend and
lets the ranks agree through the group's store first, where the user asks for it (`wanted`): a
tool to find a mistake with, not one to train with, as it costs a few visits to the store a call.

How is told in `verify.rounds`. Where ranks differ, or time is up, the group is broken: later calls
raise the same error.

**Asynchronous calls** must not wait for peers, so their rounds are held on a thread of their own,
in order; later calls queue behind them.

Threads: as `Backend` demands; the engine sees one call at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch

from dure import env
from dure.comm.backends.base import Backend, BackendOptions, Ticket
from dure.comm.backends.threads.moves import Call
from dure.comm.backends.verify.rounds import Rounds
from dure.comm.ops import ReduceOp
from dure.errors import CommError, CommTimeout, DureError, InternalError
from dure.trace.ring import call_site

__all__ = ["CHECK_THEMSELVES", "VerifyingBackend", "wanted"]

CHECK_THEMSELVES = frozenset({"shm", "threads", "mpi", "hybrid", "hybrid_mpi"})
"""Backends that compare calls anyway."""

Start = Callable[[], Ticket | None]


def wanted(options: BackendOptions) -> bool:
    """Tell whether the user asks for verification: DURE_VERIFY=1 or pg_options={"verify": True}."""
    given = options.pg_options
    named = given.get("verify") if isinstance(given, Mapping) else None
    asked = options.extra.get("verify", named)
    return env.flag("DURE_VERIFY") if asked is None else bool(asked)


class _Queued:
    """The ticket of a call that waits for its round. Threads: any method, from any thread."""

    def __init__(self, call: Call, start: Start) -> None:
        self.call, self.start = call, start
        self.known = threading.Event()
        self.ticket: Ticket | None = None
        self.error: DureError | None = None

    @property
    def source(self) -> int:
        return -1

    def settle(self, ticket: Ticket | None, error: DureError | None) -> None:
        """Hand over what became of the round: the engine's ticket, or an error."""
        self.ticket, self.error = ticket, error
        self.known.set()

    def done(self) -> bool:
        if not self.known.is_set():
            return False
        return self.ticket is None or self.ticket.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        began = time.monotonic()
        if not self.known.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        if self.ticket is None:
            return True
        spent = time.monotonic() - began
        return self.ticket.wait(None if timeout_s is None else max(timeout_s - spent, 0.001))


class VerifyingBackend:
    """A backend whose collectives are compared before data move (see the module's text).

    Args:
        inner: What moves the data. It must not be used by anybody else.
        options: What it was made from.
    """

    def __init__(self, inner: Backend, options: BackendOptions) -> None:
        self.name, self.device_types = inner.name, inner.device_types
        self._inner, self._options = inner, options
        self._rounds = Rounds(options)
        self._lock = threading.Lock()  # of the fields below
        self._engine = threading.Lock()  # the engine sees one call at a time
        self._queue: SimpleQueue[_Queued | None] = SimpleQueue()
        self._num_queued = 0
        self._worker: threading.Thread | None = None
        self._broken: DureError | None = None

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a round waits, and the engine's limit where it can be changed."""
        self._rounds.timeout_s = timeout.total_seconds()
        change = getattr(self._inner, "set_timeout", None)
        if change is not None:
            change(timeout)

    def gone(self, rank: int) -> bool:
        """Tell whether `rank` has left."""
        return self._rounds.has_left(rank)

    # Rounds -------------------------------------------------------------------------------------

    def _verified(self, call: Call, start: Start, async_op: bool) -> Ticket | None:
        """Compare `call` with the other ranks', then `start` it."""
        with self._lock:
            inline = not async_op and not self._num_queued
            queued = None if inline else self._enqueue(_Queued(call, start))
        if queued is None:
            ticket = self._hold(call, start)
            if ticket is not None:
                ticket.wait()
            return None
        if async_op:
            return queued
        queued.wait()
        return None

    def _enqueue(self, queued: _Queued) -> _Queued:
        self._num_queued += 1
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="dure-verify", daemon=True)
            self._worker.start()
        self._queue.put(queued)
        return queued

    def _work(self) -> None:
        while (queued := self._queue.get()) is not None:
            ticket: Ticket | None = None
            error: DureError | None = None
            try:
                ticket = self._hold(queued.call, queued.start)
            except DureError as e:
                error = e
            except Exception as e:  # or who waits would wait for good
                error = InternalError("verification failed", seen=f"{type(e).__name__}: {e}")
            with self._lock:
                self._num_queued -= 1
            queued.settle(ticket, error)

    def _hold(self, call: Call, start: Start) -> Ticket | None:
        """Hold the round of `call`; return the engine's ticket."""
        if self._broken is not None:
            raise self._broken
        try:
            self._rounds.hold(call)
        except CommError as error:
            self._broken = error
            if isinstance(error, CommTimeout):
                self._inner.close(True)  # so that nobody goes on waiting in the engine
            raise
        return self._start(start)

    def _start(self, start: Start) -> Ticket | None:
        with self._engine:
            return start()

    def _call(self, op: str, inputs: Sequence[torch.Tensor], **what: object) -> Call:
        outputs = what.pop("outputs", inputs)
        return Call(op=op, inputs=inputs, outputs=outputs, site=call_site(), **what)  # pyright: ignore[reportArgumentType]

    # Collectives --------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Ticket | None:
        """See `Backend.all_reduce`."""
        call = self._call("all_reduce", (tensor,), reduce=op)
        return self._verified(call, lambda: self._inner.all_reduce(tensor, op, True), async_op)

    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp, async_op: bool) -> Ticket | None:
        """See `Backend.reduce`."""
        call = self._call("reduce", (tensor,), reduce=op, root=dst)
        return self._verified(call, lambda: self._inner.reduce(tensor, dst, op, True), async_op)

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool) -> Ticket | None:
        """See `Backend.broadcast`."""
        call = self._call("broadcast", (tensor,), root=src)
        return self._verified(call, lambda: self._inner.broadcast(tensor, src, True), async_op)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_gather`."""
        call = self._call("all_gather", (tensor,), outputs=outputs)
        return self._verified(call, lambda: self._inner.all_gather(outputs, tensor, True), async_op)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_gather_single`."""
        call = self._call("all_gather_single", (tensor,), outputs=(output,))
        return self._verified(
            call, lambda: self._inner.all_gather_single(output, tensor, True), async_op
        )

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        dst: int,
        async_op: bool,
    ) -> Ticket | None:
        """See `Backend.gather`."""
        call = self._call("gather", (tensor,), outputs=outputs or (), root=dst)
        return self._verified(
            call, lambda: self._inner.gather(outputs, tensor, dst, True), async_op
        )

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        src: int,
        async_op: bool,
    ) -> Ticket | None:
        """See `Backend.scatter`."""
        call = self._call("scatter", inputs or (), outputs=(tensor,), root=src)
        return self._verified(
            call, lambda: self._inner.scatter(tensor, inputs, src, True), async_op
        )

    def reduce_scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, async_op: bool
    ) -> Ticket | None:
        """See `Backend.reduce_scatter`."""
        call = self._call("reduce_scatter", inputs, outputs=(tensor,), reduce=op)
        return self._verified(
            call, lambda: self._inner.reduce_scatter(tensor, inputs, op, True), async_op
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, async_op: bool
    ) -> Ticket | None:
        """See `Backend.reduce_scatter_single`."""
        call = self._call("reduce_scatter_single", (tensor,), outputs=(output,), reduce=op)
        return self._verified(
            call, lambda: self._inner.reduce_scatter_single(output, tensor, op, True), async_op
        )

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_to_all`."""
        call = self._call("all_to_all", inputs, outputs=outputs)
        return self._verified(call, lambda: self._inner.all_to_all(outputs, inputs, True), async_op)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_to_all_single`."""
        call = self._call("all_to_all_single", (tensor,), outputs=(output,))
        return self._verified(
            call, lambda: self._inner.all_to_all_single(output, tensor, True), async_op
        )

    def barrier(self, async_op: bool) -> Ticket | None:
        """See `Backend.barrier`."""
        call = self._call("barrier", ())
        return self._verified(call, lambda: self._inner.barrier(True), async_op)

    # The rest -----------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Ticket | None:
        """See `Backend.send`; messages are not compared: their two ends need not come together."""
        ticket = self._start(lambda: self._inner.send(tensor, dst, tag, True))
        if async_op or ticket is None:
            return ticket
        ticket.wait()
        return None

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Ticket:
        """See `Backend.recv`."""
        with self._engine:
            ticket = self._inner.recv(tensor, src, tag, True)
        if not async_op:
            ticket.wait()
        return ticket

    def shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """See `Backend.shared_empty`."""
        return self._inner.shared_empty(nbytes)

    def host_shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """See `Backend.host_shared_empty`."""
        return self._inner.host_shared_empty(nbytes)

    def close(self, abort: bool) -> None:
        """See `Backend.close`."""
        self._rounds.leave()
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            self._queue.put(None)
            worker.join()  # a round looks now and then whether the group was left
        self._inner.close(abort)
