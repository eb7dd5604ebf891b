"""Collectives as linear maps: out of place, with their transposes as gradients.

Taken over all ranks, a collective that moves or sums is a linear map from everybody's inputs to
everybody's outputs. If the loss is the sum of what all ranks call backward on, the gradient of the
inputs is the transposed map applied to the gradients of the outputs, and every transpose is a
collective again:

* ``all_reduce(SUM)`` and ``all_reduce(AVG)``: themselves;
* `AllGather`: `ReduceScatter` with SUM, along the same dim; and back;
* `AllToAll`: itself, with the split sizes changed over;
* `Broadcast` from a root: `Reduce` to it, zero elsewhere; and back;
* `Scatter` from a root: `Gather` to it, zero elsewhere; and back.

So what is not the root gets zeros from `Reduce` and `Gather`, which makes them maps in the first
place. A transpose is run by the same `apply` and can be differentiated in turn. What is neither
moved nor summed (MIN, MAX, PRODUCT, bits) is computed, and refused in backward.

A map holds its group: backward may run on a thread whose current world is another. All ranks must
run the same backward: inputs require gradients either on all ranks or on none.
"""

# ruff: noqa: D102 (the methods are told once, in Map; each class says which map it is)

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dure.comm.group import ProcessGroup
from dure.comm.memory import heap_empty
from dure.comm.ops import ReduceOp, as_reduce_op
from dure.comm.pending import pending
from dure.comm.work import Work
from dure.errors import ShapeError, UsageError

Tensors = tuple[torch.Tensor, ...]
Shapes = tuple[torch.Size, ...]
Started = tuple[Tensors, Work | None]

_LARGE_BYTES = 1 << 20
"""Results from here on gain from lying in the heap; smaller ones lose.

Measured: docs/decisions/0004-symmetric-heap.md.
"""


@dataclass(frozen=True, slots=True)
class Map:
    """A collective as a map from this rank's inputs to this rank's outputs."""

    group: ProcessGroup

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        """Return the outputs, and with `async_op` the work that writes them."""
        raise NotImplementedError

    def transposed(self) -> Map:
        """The map that takes gradients of the outputs to gradients of the inputs."""
        raise NotImplementedError

    def gradients(self, grads: Tensors) -> Tensors:
        """Return the gradients of the inputs; run by all ranks of the group."""
        return apply(self.transposed(), *grads, wait=True)

    def allocate(
        self, like: torch.Tensor, shape: Sequence[int] | None = None, *, zero: bool = False
    ) -> torch.Tensor:
        """Return memory for a result: contiguous, of the dtype and on the device of `like`.

        Large ones lie in the symmetric heap where ranks of the group share memory: this
        collective, and the next one of the result, need no copy through staging.
        """
        if shape is None:
            shape = like.shape
        large = math.prod(shape) * like.itemsize >= _LARGE_BYTES and like.is_cpu
        if large and len(self.group.hosts) < self.group.size():
            return heap_empty(*shape, dtype=like.dtype, zeroed=zero)
        make = torch.zeros if zero else torch.empty
        return make(shape, dtype=like.dtype, device=like.device)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, in memory for a result."""
        return self.allocate(tensor).copy_(tensor)


@dataclass(frozen=True, slots=True)
class Reduction(Map):
    """A map that reduces; it has a transpose where that is a sum or an average."""

    name: ClassVar[str]
    op: ReduceOp

    def gradients(self, grads: Tensors) -> Tensors:
        self._check_linear()
        moved = apply(self.transposed(), *grads, wait=True)
        averages = self.op == ReduceOp.AVG
        return tuple(grad / self.group.size() for grad in moved) if averages else moved

    def _check_linear(self) -> None:
        if self.op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise UsageError(
                f"{self.name} with {self.op.name} has no gradient",
                op=self.name,
                group=self.group.group_name,
                seen="only SUM, AVG and premultiplied sums can be differentiated",
                fix="Detach its input, or write the gradient as an autograd.Function.",
            )


class _Apply(torch.autograd.Function):
    """Runs a map; `works` collects the work of an asynchronous run, None waits here."""

    @staticmethod
    def forward(ctx: Any, what: Map, works: list[Work] | None, *inputs: torch.Tensor) -> Tensors:
        ctx.map = what
        outputs, work = what.start(inputs, works is not None)
        if works is not None and work is not None:
            works.append(work)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.map.gradients(grads)


def apply(what: Map, *inputs: torch.Tensor, wait: bool = False) -> Tensors:
    """Run a map; its outputs are waited for at their first use, or here with `wait`."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        works: list[Work] | None = None if wait else []
        outputs: Any = _Apply.apply(what, works, *inputs)
        work = works[0] if works else None
    else:
        outputs, work = what.start(inputs, not wait)
    if work is not None:
        for output in outputs:
            pending(output, work)
    return outputs


def summed(tensor: torch.Tensor, op: object) -> tuple[torch.Tensor, ReduceOp]:
    """Turn a premultiplied sum into a sum of scaled inputs, which autograd understands."""
    reduction = as_reduce_op(op)
    if reduction.name != "PREMUL_SUM":
        return tensor, reduction
    return tensor * reduction.checked_factor(), ReduceOp.SUM


@dataclass(frozen=True, slots=True)
class AllReduce(Reduction):
    """y = x of all ranks, reduced."""

    name = "all_reduce"

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        output = self.allocate(inputs[0])
        return (output,), self.group.all_reduce_into(output, inputs[0], self.op, async_op)

    def gradients(self, grads: Tensors) -> Tensors:
        self._check_linear()
        return apply(self, *grads, wait=True)  # of an average: the average


@dataclass(frozen=True, slots=True)
class Broadcast(Map):
    """y = x of group rank `src`."""

    src: int

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        output = self.copy(inputs[0]) if self.group.rank() == self.src else self.allocate(inputs[0])
        return (output,), self.group.broadcast(output, self.src, async_op)

    def transposed(self) -> Map:
        return Reduce(self.group, ReduceOp.SUM, self.src)


@dataclass(frozen=True, slots=True)
class Reduce(Reduction):
    """y = x of all ranks, reduced, on group rank `dst`; zeros elsewhere."""

    name = "reduce"
    dst: int

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        if self.group.rank() == self.dst:
            output = self.copy(inputs[0])
            return (output,), self.group.reduce(output, self.dst, self.op, async_op)
        work = self.group.reduce(inputs[0], self.dst, self.op, async_op)
        return (self.allocate(inputs[0], zero=True),), work

    def transposed(self) -> Map:
        return Broadcast(self.group, self.dst)


@dataclass(frozen=True, slots=True)
class Gather(Map):
    """y_i = x of rank i, on group rank `dst`; zeros elsewhere. All x have one shape."""

    dst: int

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        here = self.group.rank() == self.dst
        outputs = tuple(self.allocate(inputs[0], zero=not here) for _ in range(self.group.size()))
        work = self.group.gather(inputs[0], outputs if here else None, self.dst, async_op)
        return outputs, work

    def transposed(self) -> Map:
        return Scatter(self.group, self.dst)


@dataclass(frozen=True, slots=True)
class Scatter(Map):
    """y = x_r of group rank `src`; the others' x only say what shape comes."""

    src: int

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        if len(inputs) != self.group.size() or any(t.shape != inputs[0].shape for t in inputs):
            raise ShapeError(
                "scatter takes one tensor for each rank, all of one shape, on every rank",
                op="scatter",
                group=self.group.group_name,
                seen=f"shapes {[tuple(t.shape) for t in inputs]} for {self.group.size()} ranks",
            )
        output = self.allocate(inputs[0])
        given = inputs if self.group.rank() == self.src else None
        return (output,), self.group.scatter(output, given, self.src, async_op)

    def transposed(self) -> Map:
        return Gather(self.group, self.src)


@dataclass(frozen=True, slots=True)
class AllGather(Map):
    """y = x of all ranks, joined along `dim`. All x have one shape, of at least one dim."""

    dim: int

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        (tensor,), n = inputs, self.group.size()
        shape = list(tensor.shape)
        shape[self.dim] *= n
        output = self.allocate(tensor, shape)
        if self.dim == 0:
            return (output,), self.group.all_gather_single(output, tensor, async_op)
        parts = output.chunk(n, self.dim)
        return (output,), self.group.all_gather(parts, tensor, async_op)

    def transposed(self) -> Map:
        return ReduceScatter(self.group, ReduceOp.SUM, self.dim)


@dataclass(frozen=True, slots=True)
class ReduceScatter(Reduction):
    """y = part r along `dim` of all ranks' x, reduced."""

    name = "reduce_scatter"
    dim: int

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        (tensor,), n = inputs, self.group.size()
        if tensor.shape[self.dim] % n:
            raise ShapeError(
                "the tensor does not divide by the number of ranks",
                op="reduce_scatter",
                group=self.group.group_name,
                seen=f"shape {tuple(tensor.shape)}, dim {self.dim}, for {n} ranks",
            )
        shape = list(tensor.shape)
        shape[self.dim] //= n
        output = self.allocate(tensor, shape)
        if self.dim == 0:
            work = self.group.reduce_scatter_single(output, tensor, self.op, async_op)
        else:
            parts = tensor.split(shape[self.dim], self.dim) if shape[self.dim] else [tensor] * n
            work = self.group.reduce_scatter(output, parts, self.op, async_op)
        return (output,), work

    def transposed(self) -> Map:
        return AllGather(self.group, self.dim)


@dataclass(frozen=True, slots=True)
class AllToAll(Map):
    """Rows of x to all ranks, rows of y from all ranks; without split sizes equal parts.

    Written to `into` if given.
    """

    takes: tuple[int, ...]
    gives: tuple[int, ...]
    into: torch.Tensor | None = None

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        (tensor,) = inputs
        if self.into is not None:
            output = self.into.detach()
        else:
            rows = sum(self.takes) if self.takes else tensor.shape[0]
            output = self.allocate(tensor, (rows, *tensor.shape[1:]))
        work = self.group.all_to_all_single(output, tensor, self.takes, self.gives, async_op)
        return (output,), work

    def transposed(self) -> Map:
        return AllToAll(self.group, self.gives, self.takes)


@dataclass(frozen=True, slots=True)
class AllGatherList(Map):
    """y_i = x of rank i, on all ranks; `shapes` are those of the x."""

    shapes: Shapes

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        outputs = tuple(self.allocate(inputs[0], shape) for shape in self.shapes)
        return outputs, self.group.all_gather(outputs, inputs[0], async_op)

    def transposed(self) -> Map:
        return ReduceScatterList(self.group, ReduceOp.SUM, self.shapes)


@dataclass(frozen=True, slots=True)
class ReduceScatterList(Reduction):
    """y = x_r of all ranks, reduced; `shapes` are those of the x. Written to `into` if given."""

    name = "reduce_scatter"
    shapes: Shapes
    into: torch.Tensor | None = None

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        mine = self.shapes[self.group.rank()]
        output = self.allocate(inputs[0], mine) if self.into is None else self.into.detach()
        return (output,), self.group.reduce_scatter(output, inputs, self.op, async_op)

    def transposed(self) -> Map:
        return AllGatherList(self.group, self.shapes)

    def gradients(self, grads: Tensors) -> Tensors:
        # slots=True makes a class anew, which super() without arguments does not know.
        return Reduction.gradients(self, (grads[0].reshape(self.shapes[self.group.rank()]),))


@dataclass(frozen=True, slots=True)
class AllToAllList(Map):
    """y_i = x_r of rank i; the shapes are those of the y and the x. Written to `into` if given."""

    takes: Shapes
    gives: Shapes
    into: Tensors | None = None

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        if self.into is None:
            outputs = tuple(self.allocate(inputs[0], shape) for shape in self.takes)
        else:
            outputs = tuple(t.detach() for t in self.into)
        return outputs, self.group.all_to_all(outputs, inputs, async_op)

    def transposed(self) -> Map:
        return AllToAllList(self.group, self.gives, self.takes)
