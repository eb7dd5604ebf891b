"""Plain calls: the fast path of a process group.

A call on plain tensors (contiguous, on the CPU, of a real dtype; see csrc/bindings/tensor.h) goes
straight to the engine, which makes the checks of the slow path in one look at the tensor: no list,
no closure, no object is made on the way, but the request and the `Work` of an asynchronous call.
What the engine declines, having done nothing, takes the slow path; so does everything while a hook
listens, in a coalescing manager, and on backends without plain calls. None, which the binding does
not take, takes it too.

Every method has the same shape, written out because a helper would cost as much as the rest.
"""

# pyright: reportUnnecessaryComparison=false
# (what users pass is what is looked at)

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch

from dure.comm.group.operations import Operations
from dure.comm.ops import ReduceOp
from dure.comm.work import Work
from dure.trace import hooks

__all__ = ["Plain"]


class Plain(Operations):
    """Operations that may take the fast path; each does what its namesake in the bases does."""

    def all_reduce(
        self, tensor: torch.Tensor, op: object = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce `tensor` of all ranks, in place, on all ranks."""
        if self._plain is not None and not (hooks or tensor is None or op is None):
            if async_op:
                done = self._plain.start_all_reduce(tensor, op)
                if done:
                    return self._plain_work("all_reduce", done, tensor)
            else:
                done = self._plain.plain_all_reduce(tensor, op)
                if done is True:
                    self.seq += 1
                    return None
                if done:
                    raise self._plain_error(done)
        return super().all_reduce(tensor, op, async_op)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce part i [k] of `input` [n*k] of all ranks into rank i's `output` [k]."""
        if self._plain is not None and not (hooks or output is None or input is None or op is None):
            if async_op:
                done = self._plain.start_reduce_scatter(output, input, op)
                if done:
                    return self._plain_work("reduce_scatter_single", done, output)
            else:
                done = self._plain.plain_reduce_scatter(output, input, op)
                if done is True:
                    self.seq += 1
                    return None
                if done:
                    raise self._plain_error(done)
        return super().reduce_scatter_single(output, input, op, async_op)

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> Work | None:
        """Copy `tensor` of group rank `src` to all."""
        if self._plain is not None and not (hooks or tensor is None):
            if async_op:
                done = self._plain.start_broadcast(tensor, src)
                if done:
                    return self._plain_work("broadcast", done, tensor)
            else:
                done = self._plain.plain_broadcast(tensor, src)
                if done is True:
                    self.seq += 1
                    return None
                if done:
                    raise self._plain_error(done)
        return super().broadcast(tensor, src, async_op)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False
    ) -> Work | None:
        """Copy rank i's `input` [k] to `output` [n*k] at i*k on all ranks."""
        if self._plain is not None and not (hooks or output is None or input is None):
            if async_op:
                done = self._plain.start_all_gather(output, input)
                if done:
                    return self._plain_work("all_gather_single", done, output)
            else:
                done = self._plain.plain_all_gather(output, input)
                if done is True:
                    self.seq += 1
                    return None
                if done:
                    raise self._plain_error(done)
        return super().all_gather_single(output, input, async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Exchange rows of `input` by rank; equal parts unless split sizes (in rows) are given."""
        # Split sizes may be arrays, which have no truth value; torch passes [] where it has none.
        even = (
            output_split_sizes is None
            or (type(output_split_sizes) is list and not output_split_sizes)
        ) and (
            input_split_sizes is None or (type(input_split_sizes) is list and not input_split_sizes)
        )
        if even and self._plain is not None and not (hooks or output is None or input is None):
            if async_op:
                done = self._plain.start_all_to_all(output, input)
                if done:
                    return self._plain_work("all_to_all_single", done, output)
            else:
                done = self._plain.plain_all_to_all(output, input)
                if done is True:
                    self.seq += 1
                    return None
                if done:
                    raise self._plain_error(done)
        return super().all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, async_op
        )

    def barrier(
        self, async_op: bool = False, timeout: timedelta | float | None = None
    ) -> Work | None:
        """Return when all ranks have called; `timeout` is a limit below the group's own."""
        if self._plain is not None and not hooks and timeout is None:
            if async_op:
                done = self._plain.start_barrier()
                if done:
                    return self._plain_work("barrier", done, None)
            else:
                done = self._plain.plain_barrier()
                if done is True:
                    self.seq += 1
                    return None
                if done:
                    raise self._plain_error(done)
        return super().barrier(async_op, timeout)

    def send(
        self, tensor: torch.Tensor, dst: int, tag: int = 0, async_op: bool = False
    ) -> Work | None:
        """Send `tensor` to group rank `dst`."""
        if self._plain is not None and not (async_op or hooks or tensor is None):
            done = self._plain.plain_send(tensor, dst, tag)
            if done is True:
                self.seq += 1
                return None
            if done:
                raise self._plain_error(done)
        return super().send(tensor, dst, tag, async_op)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int = 0) -> int:
        """Receive into `tensor` from group rank `src`, or anyone; return the sender's rank."""
        if self._plain is not None and src is not None and not (hooks or tensor is None):
            done = self._plain.plain_receive(tensor, src, tag)
            if done is True:
                self.seq += 1
                return src
            if done:
                raise self._plain_error(done)
        return super().recv(tensor, src, tag)
