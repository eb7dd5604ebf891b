"""Tensors of an accelerator over a backend for CPU tensors: by way of the host's memory.

So several ranks can share one GPU, which NCCL refuses. `StagedBackend` runs each operation on a
*staging copy* of its tensors, in pinned memory of the host:

1. *In.* The tensors that the operation reads are copied to the host in the calling thread's current
   stream, and the host waits for an event that is recorded after the copies.
2. The CPU backend's operation runs on the copies.
3. *Out.* The tensors that the operation writes are copied back in the current stream of the thread
   that waits for the operation: that of the caller, or of any later wait.

**The host waits in step 1, also for an asynchronous operation**: for work that was queued in the
stream before it, never for another rank. The CPU backend must see the operation in the order of the
calls, because other ranks may have called it with CPU tensors, which begin at once.

**Streams.** Step 3 may run in another stream than step 1, and must not overtake what the caller's
stream still does with the outputs. So that stream first waits for the event of step 1, which is
recorded for every operation: one that reads nothing does not wait for it on the host. Other threads
and streams that wait afterwards wait for an event recorded after step 3.

**Memory.** Pinned memory that is freed while a copy from it is queued is not reused before the copy
has ended: torch's allocator of pinned memory knows the stream. Its allocator of device memory only
knows the stream of the allocation, so outputs that another stream writes are reported to it
(`used_in_stream`). Results are written without a change of their versions, as backends do.

Numerics, errors, timeouts and the comparison of calls are those of the CPU backend.

Cost:
    Per operation one copy of the inputs to the host, one of the outputs from it, the CPU backend's
    cost, and a wait of the host for the stream.

Threads:
    As `Backend` demands.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec
import torch

from dure.comm.backends.base import Backend
from dure.comm.backends.request import Request, current_stream, seconds_until, used_in_stream
from dure.comm.call import Call, check_one_device
from dure.comm.pinned import pinned_empty

__all__ = ["StagedBackend", "serving"]

Tensors = Sequence[torch.Tensor]
_ALIGNMENT = 64


def serving(backend: Backend, kind: str, rank: int) -> Backend:
    """Return what serves tensors on devices of type `kind`: the backend itself, or by staging."""
    return backend if kind in backend.device_types else StagedBackend(backend, kind, rank)


def _staging_for(tensors: Tensors) -> list[torch.Tensor]:
    """Return memory of the host for each of `tensors`, in one block."""
    starts = [*accumulate((-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in tensors), initial=0)]
    block = pinned_empty((starts[-1],), torch.uint8)
    return [
        block[start : start + t.nbytes].view(t.dtype).view(t.shape)
        for start, t in zip(starts, tensors, strict=False)
    ]


class _Staging:
    """The staging copies of one operation; its inputs are on the host when it has been made.

    Args:
        inputs: Of the operation.
        outputs: Of the operation; the same object as `inputs` if it is in place.
        reads: Whether this rank's inputs are read.
        writes: Whether this rank's outputs are written.
    """

    def __init__(
        self, inputs: Tensors, outputs: Tensors, reads: bool = True, writes: bool = True
    ) -> None:
        in_place = inputs is outputs
        copies = _staging_for(inputs if in_place else (*inputs, *outputs))
        self.inputs = copies[: len(inputs)]
        self.outputs = self.inputs if in_place else copies[len(inputs) :]
        self._results = [*zip(outputs, self.outputs, strict=True)] if writes else []
        self.device = (inputs or outputs)[0].device
        if reads:
            for copy, tensor in zip(self.inputs, inputs, strict=True):
                copy.copy_(tensor, non_blocking=True)
        self._issued = current_stream(self.device).record_event()
        if reads and inputs:
            self._issued.synchronize()

    def copy_back(self) -> None:
        """Copy the results to the outputs, in the current stream."""
        current_stream(self.device).wait_event(self._issued)
        for output, copy in self._results:
            used_in_stream(output)
            output.data.copy_(copy, non_blocking=True)  # `data`: the version does not change


class _StagedRequest(Request):
    """A pending operation on staging copies.

    Args:
        inner: The CPU backend's request.
        staging: Of the operation.
    """

    __slots__ = ("_copied", "_device", "_inner", "_settling", "_staging", "stream_device")

    def __init__(self, inner: Request, staging: _Staging) -> None:
        super().__init__()
        self._inner, self._staging = inner, staging
        self.stream_device = self._device = staging.device
        self._copied: Any = None  # an event, recorded after the results were copied back
        self._settling = threading.Lock()

    def done(self) -> bool:
        """See `Request.done`; the next wait copies the results back."""
        return self.ended or self._left_behind() or self._inner.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Request.wait`: the host waits for the operation, the current stream for the copies.

        After an error the tensors are as they were.
        """
        if not super().wait(timeout_s):
            return False
        current_stream(self._device).wait_event(self._copied)
        return True

    def wait_aside(self) -> None:
        """See `Request.wait_aside`."""
        self._inner.wait_aside()
        self.wait()

    def _await(self, limit: float | None) -> bool:
        error: Exception | None = None
        try:
            if not self._inner.wait(seconds_until(limit)):
                return False
        except Exception as e:
            error = e
        with self._settling:
            if not self.ended:
                self._settle(error)
        return True

    def _settle(self, error: Exception | None) -> None:
        if error is None:
            self._staging.copy_back()
            self._copied = current_stream(self._device).record_event()
        self.end(error, self._inner.source)
        del self._staging


class StagedBackend:
    """A CPU backend that serves tensors of an accelerator (see the module's text).

    Args:
        inner: The CPU backend, which may also be used by itself.
        kind: The type of the accelerator's devices, such as "cuda".
        rank: This rank of the group.
    """

    def __init__(self, inner: Backend, kind: str, rank: int) -> None:
        self.name, self.device_types = inner.name, frozenset({kind})
        self._inner, self._rank = inner, rank

    def __getattr__(self, name: str) -> Any:
        """Return what only some backends have, as the CPU backend has it."""
        return getattr(self._inner, name)

    def run(self, call: Call, async_op: bool) -> Request | None:
        inputs, outputs = call.inputs, call.outputs
        if not (inputs or outputs):  # a barrier, say
            return self._inner.run(call, async_op)
        check_one_device((*inputs, *outputs), call.op)
        is_root, op = call.root == self._rank, call.op
        staging = _Staging(
            inputs,
            outputs,
            reads=is_root or op != "broadcast",
            writes=not is_root if op == "broadcast" else is_root or op != "reduce",
        )
        copies = msgspec.structs.replace(call, inputs=staging.inputs, outputs=staging.outputs)
        return self._finish(self._inner.run(copies, async_op), staging)

    def _finish(self, request: Request | None, staging: _Staging) -> Request | None:
        if request is not None:
            return _StagedRequest(request, staging)
        staging.copy_back()
        return None

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        staging = _Staging((tensor,), ())
        return self._finish(self._inner.send(staging.inputs[0], dst, tag, async_op), staging)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        staging = _Staging((), (tensor,))
        request = _StagedRequest(self._inner.recv(staging.outputs[0], src, tag, async_op), staging)
        if not async_op:
            request.wait()
        return request

    def allocate(self, nbytes: int, node_shared: bool) -> torch.Tensor | None:
        """See `Backend.allocate`: memory of the host."""
        return self._inner.allocate(nbytes, node_shared)

    def close(self, abort: bool) -> None:
        self._inner.close(abort)
