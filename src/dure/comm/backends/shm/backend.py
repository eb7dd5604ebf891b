"""The backend of one host: the native engine on one shared segment per group.

Notes in csrc/core describe the calls: "Segment" (segment.h), "Order of calls" (channel.h),
"Barrier" and "Waiting" (barrier.cpp), "Fingerprint" (fingerprint.cpp), "Five ways to all_reduce"
(all_reduce.cpp), "Rounds" (move.cpp), "Streaming" (copying.h), "Symmetric heap" (symmetric_heap.h).
This module turns tensors into addresses and lengths, and outcomes into exceptions.

Threads:
    Calls, requests and `close` from any thread at any time. A child process that was forked after
    the group was made must not use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import cast

import torch

from dure.comm.backends.base import BackendOptions, channel_name
from dure.comm.backends.request import Request
from dure.comm.backends.shm.copying import CopyPlan
from dure.comm.backends.shm.flight import EngineFlight
from dure.comm.call import KIND_CODES, Call
from dure.comm.codes import dtype_code
from dure.comm.memory import heap_empty, tensor_of
from dure.errors import DureError
from dure.native import Channel, Group, HeapMemory, Outcome
from dure.native import Request as EngineRequest
from dure.native.status import error_of
from dure.trace import flight, logs

__all__ = ["ShmBackend"]

_NO_REDUCTION = 8
_IN_PLACE = frozenset({"broadcast", "all_reduce", "reduce"})


def _error(
    group: str, rank: int, size: int, outcome: Outcome, pid: int, timeout_s: float
) -> DureError:
    """Make the exception for an outcome; the engine keeps this function, but not the backend."""
    label = channel_name(group, outcome.channel)
    return error_of(outcome, group=label, rank=rank, size=size, pid=pid, timeout_s=timeout_s)


def _each(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [number for t in tensors for number in (t.data_ptr(), t.nbytes)]


def _even(tensor: torch.Tensor, n: int) -> list[int]:
    start, length = tensor.data_ptr(), tensor.nbytes // n
    return [k for i in range(n) for k in (start + i * length, length)]


class ShmBackend:
    """The ranks of a group on one host (see `backends.base.Backend` for the contract).

    csrc/core documents the cost and numerics of each operation.

    Attributes:
        group: The engine's part, for backends/hybrid.
    """

    name = "shm"
    device_types = frozenset({"cpu"})
    compares_calls = True
    keeps_records = True
    fuses = True
    channels = 2

    def __init__(self, group: Group, options: BackendOptions, segment_bytes: int) -> None:
        self.group, self._segment_bytes = group, segment_bytes
        self._error = partial(_error, options.name, options.rank, options.size)
        group.set_error(self._error)
        self._channels = group.channel(0), group.channel(1)
        self.plain = self._channels[0]
        self._size = options.size
        self._timeout_s = options.timeout.total_seconds()
        if options.eager_bytes is not None:
            group.set_eager_bytes(options.eager_bytes)
        self._flight = EngineFlight(group, options)
        flight.add_source(self._flight)

    @property
    def copies(self) -> CopyPlan:
        """How the ranks copy memory."""
        return CopyPlan(*self.group.copies)

    @property
    def details(self) -> str:
        """What was chosen for the group, as text for the log."""
        return f"{self.copies}; staging buffers of {logs.size_text(self._segment_bytes)}"

    def error(self, outcome: Outcome) -> DureError:
        """Make the exception for an outcome of the engine."""
        pid = self.group.pid_of(outcome.peer) if outcome.peer >= 0 else 0
        return self._error(outcome, pid, self._timeout_s)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks of each host: all are on this one."""
        return (tuple(range(self._size)),)

    def gone(self, rank: int) -> bool:
        """Return whether `rank` has died or left."""
        return self.group.gone(rank)

    def lost(self, rank: int) -> bool:
        """Return whether the process of `rank` has ended before it left."""
        return self.group.gone(rank) and not self.group.has_left(rank)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may wait for its peers."""
        self._timeout_s = timeout.total_seconds()
        self.group.set_timeout(self._timeout_s)

    def _request(self, result: Outcome | EngineRequest | None) -> Request | None:
        """Return the engine's own request, which has the methods of `Request`."""
        if isinstance(result, Outcome):
            raise self.error(result)
        return cast("Request | None", result)

    def plain_on(self, channel: int) -> Channel:
        """Return the plain calls of one channel."""
        return self._channels[channel]

    def run(self, call: Call, async_op: bool) -> Request | None:
        if call.op == "new_group":
            return self._request(self.group.announce_group(call.nbytes, async_op))
        dtype, reduction = call.dtype, call.reduction
        into = call.outputs[0].dtype if call.outputs else dtype
        inputs, outputs = self._blocks(call)
        result = self._channels[call.channel].run(
            KIND_CODES[call.kind],
            0 if dtype is None else dtype_code(dtype),
            _NO_REDUCTION if reduction is None else reduction.code,
            call.root,
            inputs,
            outputs,
            0 if into is None else dtype_code(into),
            1.0 if reduction is None else reduction.number,
            call.subject,
            async_op,
            call,
        )
        return self._request(result)

    def _blocks(self, call: Call) -> tuple[list[int], list[int]]:
        """Return the memory of a call as the engine reads it: alternating addresses and lengths."""
        kind, n = call.kind, self._size
        if kind in _IN_PLACE:
            return [], _each(call.outputs)
        if not call.single:
            return _each(call.inputs), _each(call.outputs)
        (given,), (taken,) = call.inputs, call.outputs
        return (
            _each(call.inputs) if kind == "all_gather" else _even(given, n),
            _each(call.outputs) if kind == "reduce_scatter" else _even(taken, n),
        )

    # ---- point to point --------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        """Send `tensor` [*] to `dst`; messages of one pair and tag arrive in order."""
        code = dtype_code(tensor.dtype)
        memory = tensor.data_ptr(), tensor.nbytes, code
        return self._request(self.group.send(*memory, dst, tag, async_op, tensor))

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        """Receive into `tensor` from `src`, or from any rank; finished if not asynchronous."""
        code = dtype_code(tensor.dtype)
        source = -1 if src is None else src
        memory = tensor.data_ptr(), tensor.nbytes, code
        request = self._request(self.group.receive(*memory, source, tag, async_op, tensor))
        assert request is not None
        if not async_op:
            request.wait()
        return request

    # ---- memory and life -------------------------------------------------------------------------

    def allocate(self, nbytes: int, node_shared: bool) -> torch.Tensor:
        """See `Backend.allocate`."""
        if not node_shared:
            return heap_empty(nbytes, dtype=torch.uint8, zeroed=True, must=False)
        made = self.group.host_shared_empty(nbytes)
        if not isinstance(made, HeapMemory):
            raise self.error(made)
        return tensor_of(made, (nbytes,), torch.uint8)

    def leave_unrecorded(self) -> None:
        """Leave this group's operations out of flight records: they are steps of another group."""
        flight.forget(self._flight)

    def close(self, abort: bool) -> None:
        """Leave: pending operations end with `Aborted`; peers see that this rank left.

        The engine does not distinguish between an orderly end and an abort: a rank that has left
        affects only ranks that wait for it.
        """
        del abort
        flight.retire(self._flight)
        self.group.close()
