"""The backend of one host: the native engine on one shared segment a group.

What happens in a call is told in csrc/core: "Segment" (segment.h), "Meeting" and "Waiting"
(sync.cpp), "Signature" (opening.cpp), "Four ways to all_reduce" (all_reduce.cpp), "Rounds"
(move.cpp), "Streams" (stream.cpp), "Arena" (arena.h). This file turns tensors into addresses and
lengths, and outcomes into exceptions.

Threads: calls from any thread, one at a time; tickets and `close` from any thread at any time. A
group must not be used in a child process that was forked after the group was made.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.shm.codes import dtype_code
from dure.comm.backends.shm.flight import EngineFlight
from dure.comm.backends.shm.meeting import open_segment
from dure.comm.ops import ReduceOp
from dure.errors import DureError
from dure.native import Group, Outcome, SharedBlock, Ticket, available
from dure.native.status import error_of
from dure.trace import flight
from dure.trace.record import Record

__all__ = ["ShmBackend", "ShmTicket", "available", "create"]

_MIN_SWEEP = 16
"""Finished tickets are let go of once there are twice as many as were pending, and this many."""

_NO_REDUCTION = 8
_BARRIER, _BROADCAST, _ALL_REDUCE, _REDUCE, _ALL_GATHER = 1, 2, 3, 4, 5
_GATHER, _SCATTER, _REDUCE_SCATTER, _ALL_TO_ALL = 6, 7, 8, 9


class ShmTicket:
    """A pending operation of the engine (see `backends.base.Ticket`); keeps its tensors alive."""

    __slots__ = ("_backend", "_tensors", "_ticket")

    def __init__(self, ticket: Ticket, backend: ShmBackend, tensors: object) -> None:
        self._ticket, self._backend, self._tensors = ticket, backend, tensors

    @property
    def source(self) -> int:
        """Group rank of the sender of a finished receive; -1 otherwise."""
        return self._ticket.source

    def done(self) -> bool:
        """Tell, without blocking, whether the operation ended."""
        return self._ticket.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it ended; raise its error. False if `timeout_s` passed first."""
        if not self._ticket.wait(-1.0 if timeout_s is None else timeout_s):
            return False
        self._tensors = None
        outcome = self._ticket.outcome
        if outcome is not None:
            raise self._backend.error(outcome)
        return True


class _Blocks(NamedTuple):
    """Pieces of memory as the engine reads them, and the tensors that own them."""

    numbers: list[int]
    owners: object


_NOTHING = _Blocks([], None)


def _one(tensor: torch.Tensor) -> _Blocks:
    return _Blocks([tensor.data_ptr(), tensor.nbytes], tensor)


def _each(tensors: Sequence[torch.Tensor]) -> _Blocks:
    return _Blocks([number for t in tensors for number in (t.data_ptr(), t.nbytes)], tensors)


def _even(tensor: torch.Tensor, n: int) -> _Blocks:
    start, length = tensor.data_ptr(), tensor.nbytes // n
    return _Blocks([k for i in range(n) for k in (start + i * length, length)], tensor)


class _Call(NamedTuple):
    """What is called, in the engine's codes."""

    op: int
    dtype: int = 0
    reduction: int = _NO_REDUCTION
    root: int = -1


class ShmBackend:
    """The ranks of a group on one host (see `backends.base.Backend` for the contract).

    Cost and Numerics of each operation are told where it is implemented, in csrc/core.
    """

    name = "shm"
    device_types = frozenset({"cpu"})

    def __init__(self, group: Group, options: BackendOptions) -> None:
        self._group = self.plain = group
        self._size, self._rank = options.size, options.rank
        self._label = options.name
        self._timeout_s = options.timeout.total_seconds()
        self._lock = threading.Lock()  # of the two fields below
        self._pending: list[ShmTicket] = []
        self._sweep_at = _MIN_SWEEP
        self._flight = EngineFlight(group, options)
        flight.add_source(self._flight)

    def error(self, outcome: Outcome) -> DureError:
        """Make the exception for what the engine says."""
        pid = self._group.pid_of(outcome.peer) if outcome.peer >= 0 else 0
        return error_of(
            outcome,
            group=self._label,
            rank=self._rank,
            size=self._size,
            pid=pid,
            timeout_s=self._timeout_s,
        )

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks of each host: all are on this one."""
        return (tuple(range(self._size)),)

    def gone(self, rank: int) -> bool:
        """Tell whether `rank` has died, or left."""
        return self._group.gone(rank)

    @property
    def timeout(self) -> timedelta:
        """How long an operation may wait for its peers."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may wait for its peers."""
        self._timeout_s = timeout.total_seconds()
        self._group.set_timeout(self._timeout_s)

    def _finish(self, result: Outcome | Ticket, tensors: object) -> ShmTicket:
        if isinstance(result, Ticket):
            return self._start(result, tensors)
        raise self.error(result)

    def _start(self, pending: Ticket, tensors: object) -> ShmTicket:
        """Hold on to the tensors of an operation, even if the caller drops its ticket."""
        ticket = ShmTicket(pending, self, tensors)
        with self._lock:
            self._pending.append(ticket)
            if len(self._pending) > self._sweep_at:
                self._pending = [t for t in self._pending if not t.done()]
                self._sweep_at = 2 * len(self._pending) + _MIN_SWEEP
        return ticket

    def _run(
        self, call: _Call, inputs: _Blocks, outputs: _Blocks, async_op: bool
    ) -> ShmTicket | None:
        result = self._group.run(*call, inputs.numbers, outputs.numbers, async_op)
        return None if result is None else self._finish(result, (inputs.owners, outputs.owners))

    # ---- reductions ------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> ShmTicket | None:
        """Reduce `tensor` [*] of all ranks, in place, on all ranks."""
        call = _Call(_ALL_REDUCE, dtype_code(tensor.dtype), op.code)
        return self._run(call, _NOTHING, _one(tensor), async_op)

    def reduce(
        self, tensor: torch.Tensor, dst: int, op: ReduceOp, async_op: bool
    ) -> ShmTicket | None:
        """Reduce `tensor` [*] of all ranks into that of `dst`; the others' stay as they are."""
        call = _Call(_REDUCE, dtype_code(tensor.dtype), op.code, dst)
        return self._run(call, _NOTHING, _one(tensor), async_op)

    def reduce_scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, async_op: bool
    ) -> ShmTicket | None:
        """Reduce `inputs[i]` of all ranks into rank i's `tensor`; lengths may differ with i."""
        call = _Call(_REDUCE_SCATTER, dtype_code(tensor.dtype), op.code)
        return self._run(call, _each(inputs), _one(tensor), async_op)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, async_op: bool
    ) -> ShmTicket | None:
        """Reduce part i [k] of `tensor` [n*k] of all ranks into rank i's `output` [k]."""
        call = _Call(_REDUCE_SCATTER, dtype_code(tensor.dtype), op.code)
        return self._run(call, _even(tensor, self._size), _one(output), async_op)

    # ---- moves -----------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool) -> ShmTicket | None:
        """Copy `tensor` [*] of `src` to all."""
        call = _Call(_BROADCAST, dtype_code(tensor.dtype), root=src)
        return self._run(call, _NOTHING, _one(tensor), async_op)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool
    ) -> ShmTicket | None:
        """Copy rank i's `tensor` to `outputs[i]` on all ranks; lengths may differ between ranks."""
        call = _Call(_ALL_GATHER, dtype_code(tensor.dtype))
        return self._run(call, _one(tensor), _each(outputs), async_op)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> ShmTicket | None:
        """Copy rank i's `tensor` [k] to `output` [n*k] at i*k on all ranks."""
        call = _Call(_ALL_GATHER, dtype_code(tensor.dtype))
        return self._run(call, _one(tensor), _even(output, self._size), async_op)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        dst: int,
        async_op: bool,
    ) -> ShmTicket | None:
        """Copy rank i's `tensor` to `outputs[i]` on `dst` (None elsewhere)."""
        call = _Call(_GATHER, dtype_code(tensor.dtype), root=dst)
        return self._run(call, _one(tensor), _each(outputs or ()), async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        src: int,
        async_op: bool,
    ) -> ShmTicket | None:
        """Copy `inputs[i]` of `src` (None elsewhere) to rank i's `tensor`."""
        call = _Call(_SCATTER, dtype_code(tensor.dtype), root=src)
        return self._run(call, _each(inputs or ()), _one(tensor), async_op)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> ShmTicket | None:
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j."""
        call = _Call(_ALL_TO_ALL, dtype_code(inputs[0].dtype))
        return self._run(call, _each(inputs), _each(outputs), async_op)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> ShmTicket | None:
        """Copy part j [k] of rank i's `tensor` [n*k] to part i of rank j's `output` [n*k]."""
        call = _Call(_ALL_TO_ALL, dtype_code(tensor.dtype))
        return self._run(call, _even(tensor, self._size), _even(output, self._size), async_op)

    def barrier(self, async_op: bool) -> ShmTicket | None:
        """Return when all ranks have called."""
        return self._run(_Call(_BARRIER), _NOTHING, _NOTHING, async_op)

    # ---- point to point --------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> ShmTicket | None:
        """Send `tensor` [*] to `dst`; messages of one pair and tag arrive in order."""
        code = dtype_code(tensor.dtype)
        result = self._group.send(tensor.data_ptr(), tensor.nbytes, code, dst, tag, async_op)
        return None if result is None else self._finish(result, tensor)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> ShmTicket:
        """Receive into `tensor` from `src`, or from anyone; a finished ticket where not async."""
        code = dtype_code(tensor.dtype)
        source = -1 if src is None else src
        pending = self._group.receive(tensor.data_ptr(), tensor.nbytes, code, source, tag, async_op)
        if async_op:
            return self._start(pending, tensor)
        ticket = ShmTicket(pending, self, None)
        ticket.wait()
        return ticket

    # ---- memory and life -------------------------------------------------------------------------

    def shared_empty(self, nbytes: int) -> torch.Tensor:
        """Allocate `nbytes` (uint8, zeroed) that peers can reach directly; all ranks call alike."""
        return self._memory_of(self._group.shared_empty(nbytes))

    def host_shared_empty(self, nbytes: int) -> torch.Tensor:
        """Allocate `nbytes` (uint8, zeroed) that are the same on all ranks."""
        return self._memory_of(self._group.host_shared_empty(nbytes))

    def _memory_of(self, made: SharedBlock | Outcome) -> torch.Tensor:
        if not isinstance(made, SharedBlock):
            raise self.error(made)
        return torch.frombuffer(made, dtype=torch.uint8) if made.bytes else _empty()

    def records(self) -> list[Record]:
        """Return the last operations, as the engine has kept them."""
        return self._flight.records()

    def leave_unrecorded(self) -> None:
        """Leave these operations out of flight records: they are steps of another group's."""
        flight.forget(self._flight)

    def hurry(self) -> None:
        """Let whoever waits here run out of time now, and so find out who is missing."""
        self._group.set_timeout(0.0)

    def sender_of(self, tag: int) -> int:
        """Return who sent the first message with `tag` that awaits its receive; -1 if none did."""
        return self._group.sender_of(tag)

    def condemn(self, detail: str) -> None:
        """Break the group on all ranks, for a reason that lies outside it."""
        self._group.condemn(detail)

    def failure(self) -> Outcome | None:
        """Return what the group is broken by."""
        return self._group.failure()

    def pid_of(self, rank: int) -> int:
        """Return the process of `rank`; 0 once this rank has left."""
        return self._group.pid_of(rank)

    def has_left(self, rank: int) -> bool:
        """Tell whether `rank` left the group; True once this rank has."""
        return self._group.has_left(rank)

    def close(self, abort: bool) -> None:
        """Leave: pending operations end with `Aborted`; peers see that this rank left.

        The engine makes no difference between an orderly end and an abort: a rank that has left
        disturbs nobody who does not wait for it.
        """
        del abort
        flight.retire(self._flight)
        self._group.close()


def _empty() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def create(options: BackendOptions) -> ShmBackend:
    """Make the group's segment, or map it (`shm.meeting.open_segment`, also for the errors)."""
    return ShmBackend(open_segment(options), options)
