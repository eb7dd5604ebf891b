"""Collectives as linear maps: out of place, with their transposes as gradients.

Over all ranks, a collective that moves or sums data is a linear map from the inputs of all ranks to
the outputs of all ranks. If the loss is the sum of the losses of all ranks, the gradient of the
inputs is the transposed map applied to the gradients of the outputs. Each transpose is a collective
again:

* ``all_reduce(SUM)`` and ``all_reduce(AVG)``: themselves;
* `AllGather`: `ReduceScatter` with SUM, along the same dim; and vice versa;
* `AllToAll`: itself, with the split sizes exchanged;
* `Broadcast` from a root: `Reduce` to it, zero on other ranks; and vice versa;
* `Scatter` from a root: `Gather` to it, zero on other ranks; and vice versa.

So `Reduce` and `Gather` return zeros on ranks other than the root. `apply` also runs the transpose,
which can be differentiated again. Reductions that are not sums (MIN, MAX, PRODUCT, bits) run
forward, and backward raises an error.

This is the one mechanism of `dure.comm.functional`, `dure.nn.functional` and DTensor's
redistribution: their functions find the group, make a map, and call `apply`.

A map holds its group, because backward may run on a thread with another current world. All ranks
must run the same backward: inputs require gradients either on all ranks or on none.

While a graph is captured (capture.py) `apply` calls operators of torch (operators.py) instead:
those of `captured`.
"""

# ruff: noqa: D102 (Map documents the methods; each class documents its map)

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dure.comm.capture import capturing, in_transform, is_jit_tracing, making_a_graph
from dure.comm.checks import check_memory, parts_first
from dure.comm.group import ProcessGroup
from dure.comm.memory import heap_empty
from dure.comm.ops import ReduceOp, as_reduce_op
from dure.comm.pending import finished, pending
from dure.comm.work import Work
from dure.errors import ShapeError, UsageError

Tensors = tuple[torch.Tensor, ...]
Shapes = tuple[torch.Size, ...]
Started = tuple[Tensors, Work | None]

_LARGE_BYTES = 1 << 20
"""Results of this size and larger are faster in the symmetric heap; smaller ones are slower.

Measured: docs/decisions/0004-symmetric-heap.md.
"""


_ops: Any = torch.ops.dure


@dataclass(frozen=True, slots=True)
class Map:
    """A collective as a map from this rank's inputs to this rank's outputs."""

    group: ProcessGroup

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        """Return the outputs, and with `async_op` the work that writes them."""
        raise NotImplementedError

    def captured(self, inputs: Tensors) -> Tensors:
        """Return the outputs as results of operators, which are nodes of a graph."""
        raise NotImplementedError

    def transposed(self) -> Map:
        """The map that takes gradients of the outputs to gradients of the inputs."""
        raise NotImplementedError

    def gradients(self, grads: Tensors) -> Tensors:
        """Return the gradients of the inputs; run by all ranks of the group."""
        return apply(self.transposed(), *grads, wait=True)

    def tangents(self, tangents: Tensors) -> Tensors:
        """Return the derivatives of the outputs in the direction of `tangents`."""
        return apply(self, *tangents, wait=True)

    def allocate(
        self, like: torch.Tensor, shape: Sequence[int] | None = None, *, zero: bool = False
    ) -> torch.Tensor:
        """Return memory for a result: contiguous, of the dtype and on the device of `like`.

        Large results are allocated in the symmetric heap, if they fit and if ranks of the group
        share memory: then this collective, and the next one of the result, need no staging.
        """
        if shape is None:
            shape = like.shape
        large = math.prod(shape) * like.itemsize >= _LARGE_BYTES and like.is_cpu
        if large and self.group.num_hosts < self.group.size():
            return heap_empty(*shape, dtype=like.dtype, zeroed=zero, copied=True, must=False)
        make = torch.zeros if zero else torch.empty
        return make(shape, dtype=like.dtype, device=like.device)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, in memory for a result."""
        return self.allocate(tensor).copy_(tensor)


@dataclass(frozen=True, slots=True)
class ReducingMap(Map):
    """A map that reduces; it has a transpose if the reduction is a sum or an average."""

    name: ClassVar[str]
    op: ReduceOp

    @property
    def op_name(self) -> str:
        """The reduction as operators take it."""
        return self.op.name.lower()

    def gradients(self, grads: Tensors) -> Tensors:
        self._check_linear()
        moved = apply(self.transposed(), *grads, wait=True)
        averages = self.op == ReduceOp.AVG
        return tuple(grad / self.group.size() for grad in moved) if averages else moved

    def tangents(self, tangents: Tensors) -> Tensors:
        self._check_linear()
        return Map.tangents(self, tangents)

    def _check_linear(self) -> None:
        if self.op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise UsageError(
                f"{self.name} with {self.op.name} has no gradient",
                op=self.name,
                group=self.group.group_name,
                seen="only SUM, AVG and premultiplied sums have one",
                fix="Detach its input, or write the gradient as an autograd.Function.",
            )


class _Apply(torch.autograd.Function):
    """Runs a map; `works` collects the work of an asynchronous run. None: wait here."""

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


class _Transformed(torch.autograd.Function):
    """Runs a map under transforms of torch.func, and for derivatives in forward mode.

    It is separate because a function with `setup_context` costs microseconds more.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(what: Map, *inputs: torch.Tensor) -> Tensors:
        return what.captured(inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.map = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.map.gradients(grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensors:
        return ctx.map.tangents(tangents[1:])


def apply(what: Map, *inputs: torch.Tensor, wait: bool = False) -> Tensors:
    """Run a map; wait for its outputs at their first use, or here with `wait`."""
    if torch.compiler.is_dynamo_compiling():
        return what.captured(inputs)
    if capturing(inputs):
        if in_transform():
            return _Transformed.apply(what, *inputs)
        captured = what.captured(inputs)
        return captured if wait or making_a_graph(inputs) else tuple(map(finished, captured))
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
class AllReduce(ReducingMap):
    """y = x of all ranks, reduced."""

    name = "all_reduce"

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        output = self.allocate(inputs[0])
        return (output,), self.group.all_reduce_into(output, inputs[0], self.op, async_op)

    def captured(self, inputs: Tensors) -> Tensors:
        return (_ops.all_reduce(inputs[0], self.op_name, self.group.group_name),)

    def gradients(self, grads: Tensors) -> Tensors:
        self._check_linear()
        return apply(self, *grads, wait=True)  # of an average: the average


@dataclass(frozen=True, slots=True)
class Broadcast(Map):
    """y = x of group rank `src`."""

    src: int

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        check_memory(inputs[0], "broadcast")  # on each rank, though that of `src` alone is read
        output = self.copy(inputs[0]) if self.group.rank() == self.src else self.allocate(inputs[0])
        return (output,), self.group.broadcast(output, self.src, async_op)

    def captured(self, inputs: Tensors) -> Tensors:
        return (_ops.broadcast(inputs[0], self.src, self.group.group_name),)

    def transposed(self) -> Map:
        return Reduce(self.group, ReduceOp.SUM, self.src)


@dataclass(frozen=True, slots=True)
class Reduce(ReducingMap):
    """y = x of all ranks, reduced, on group rank `dst`; zeros elsewhere."""

    name = "reduce"
    dst: int

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        if self.group.rank() == self.dst:
            output = self.copy(inputs[0])
            return (output,), self.group.reduce(output, self.dst, self.op, async_op)
        work = self.group.reduce(inputs[0], self.dst, self.op, async_op)
        return (self.allocate(inputs[0], zero=True),), work

    def captured(self, inputs: Tensors) -> Tensors:
        return (_ops.reduce(inputs[0], self.op_name, self.dst, self.group.group_name),)

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

    def captured(self, inputs: Tensors) -> Tensors:
        n, name = self.group.size(), self.group.group_name
        return _ops.gather(inputs[0], self.dst, n, name).unbind(0)

    def transposed(self) -> Map:
        return Scatter(self.group, self.dst)


@dataclass(frozen=True, slots=True)
class Scatter(Map):
    """y = x_r of group rank `src`; on other ranks x only gives the shape of y."""

    src: int

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        if len(inputs) != self.group.size() or any(t.shape != inputs[0].shape for t in inputs):
            raise ShapeError(
                "scatter needs one tensor for each rank, all of one shape, on every rank",
                op="scatter",
                group=self.group.group_name,
                seen=f"shapes {[tuple(t.shape) for t in inputs]} for {self.group.size()} ranks",
            )
        output = self.allocate(inputs[0])
        given = inputs if self.group.rank() == self.src else None
        return (output,), self.group.scatter(output, given, self.src, async_op)

    def captured(self, inputs: Tensors) -> Tensors:
        return (_ops.scatter(torch.stack(inputs), self.src, self.group.group_name),)

    def transposed(self) -> Map:
        return Gather(self.group, self.src)


@dataclass(frozen=True, slots=True)
class AllGather(Map):
    """y = x of all ranks, joined along `dim`. All x have one shape, of at least one dim.

    If `sizes` are given they are the lengths of the x along `dim`, which may then differ.
    """

    dim: int
    sizes: tuple[int, ...] = ()

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        (tensor,), n = inputs, self.group.size()
        shape = list(tensor.shape)
        even = len(set(self.sizes)) < 2
        shape[self.dim] = shape[self.dim] * n if even else sum(self.sizes)
        output = self.allocate(tensor, shape)
        if even:
            parts = parts_first(output, self.dim, n)
            return (output,), self.group.all_gather_single(parts, tensor, async_op)
        parts = output.split(self.sizes, self.dim)
        return (output,), self.group.all_gather(parts, tensor, async_op)

    def captured(self, inputs: Tensors) -> Tensors:
        n, name = self.group.size(), self.group.group_name
        return (_ops.all_gather(inputs[0], self.dim, n, self.sizes, name),)

    def transposed(self) -> Map:
        return ReduceScatter(self.group, ReduceOp.SUM, self.dim, self.sizes)


@dataclass(frozen=True, slots=True)
class ReduceScatter(ReducingMap):
    """y = part r along `dim` of all ranks' x, reduced.

    `sizes` are the lengths of the parts; equal parts if empty.
    """

    name = "reduce_scatter"
    dim: int
    sizes: tuple[int, ...] = ()

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        (tensor,), n = inputs, self.group.size()
        even = len(set(self.sizes)) < 2
        shape = list(tensor.shape)
        shape[self.dim] = self.own_size(tensor)
        output = self.allocate(tensor, shape)
        if even:
            parts = parts_first(tensor, self.dim, n)
            work = self.group.reduce_scatter_single(output, parts, self.op, async_op)
        else:
            parts = tensor.split(self.sizes, self.dim)
            work = self.group.reduce_scatter(output, parts, self.op, async_op)
        return (output,), work

    def own_size(self, tensor: torch.Tensor) -> int:
        """Return how long this rank's part is."""
        size, n = tensor.shape[self.dim], self.group.size()
        if self.sizes or size % n == 0:
            return self.sizes[self.group.rank()] if self.sizes else size // n
        raise ShapeError(
            "the tensor does not divide by the number of ranks",
            op="reduce_scatter",
            group=self.group.group_name,
            seen=f"shape {tuple(tensor.shape)}, dim {self.dim}, for {n} ranks",
        )

    def captured(self, inputs: Tensors) -> Tensors:
        (tensor,), n, name = inputs, self.group.size(), self.group.group_name
        return (_ops.reduce_scatter(tensor, self.op_name, self.dim, n, self.sizes, name),)

    def transposed(self) -> Map:
        return AllGather(self.group, self.dim, self.sizes)


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

    def captured(self, inputs: Tensors) -> Tensors:
        takes, gives = self.takes, self.gives
        if is_jit_tracing():  # where a length is a tensor
            takes, gives = tuple(map(int, takes)), tuple(map(int, gives))
        output = _ops.all_to_all(inputs[0], takes, gives, self.group.group_name)
        return (output if self.into is None else _written(self.into, output),)

    def transposed(self) -> Map:
        return AllToAll(self.group, self.gives, self.takes)


@dataclass(frozen=True, slots=True)
class AllGatherList(Map):
    """y_i = x of rank i, on all ranks; `shapes` are those of the x."""

    shapes: Shapes

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        outputs = tuple(self.allocate(inputs[0], shape) for shape in self.shapes)
        return outputs, self.group.all_gather(outputs, inputs[0], async_op)

    def captured(self, inputs: Tensors) -> Tensors:
        sizes = tuple(shape.numel() for shape in self.shapes)
        joined = AllGather(self.group, 0, sizes).captured((inputs[0].reshape(-1),))[0]
        return _views(joined, self.shapes)

    def transposed(self) -> Map:
        return ReduceScatterList(self.group, ReduceOp.SUM, self.shapes)


@dataclass(frozen=True, slots=True)
class ReduceScatterList(ReducingMap):
    """y = x_r of all ranks, reduced; `shapes` are those of the x. Written to `into` if given."""

    name = "reduce_scatter"
    shapes: Shapes
    into: torch.Tensor | None = None

    def start(self, inputs: Tensors, async_op: bool) -> Started:
        mine = self.shapes[self.group.rank()]
        output = self.allocate(inputs[0], mine) if self.into is None else self.into.detach()
        return (output,), self.group.reduce_scatter(output, inputs, self.op, async_op)

    def captured(self, inputs: Tensors) -> Tensors:
        sizes = tuple(shape.numel() for shape in self.shapes)
        (output,) = ReduceScatter(self.group, self.op, 0, sizes).captured((_flat(inputs),))
        mine = self.shapes[self.group.rank()]
        return (output.view(mine) if self.into is None else _written(self.into, output),)

    def transposed(self) -> Map:
        return AllGatherList(self.group, self.shapes)

    def gradients(self, grads: Tensors) -> Tensors:
        # slots=True replaces the class, so super() without arguments fails.
        return ReducingMap.gradients(self, (grads[0].reshape(self.shapes[self.group.rank()]),))


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

    def captured(self, inputs: Tensors) -> Tensors:
        takes = tuple(shape.numel() for shape in self.takes)
        gives = tuple(shape.numel() for shape in self.gives)
        output = _ops.all_to_all(_flat(inputs), takes, gives, self.group.group_name)
        outputs = _views(output, self.takes)
        if self.into is None:
            return outputs
        return tuple(_written(t, o) for t, o in zip(self.into, outputs, strict=True))

    def transposed(self) -> Map:
        return AllToAllList(self.group, self.gives, self.takes)


def _flat(tensors: Tensors) -> torch.Tensor:
    """Return the elements of several tensors as one, [sum of their numels]."""
    return torch.cat([t.reshape(-1) for t in tensors])


def _views(flat: torch.Tensor, shapes: Shapes) -> Tensors:
    """Return the parts of `flat` as tensors of these shapes."""
    parts = flat.split([shape.numel() for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def _written(into: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Copy a result to memory of the caller; return the result, which has its history."""
    output = output.view(into.shape)
    into.detach().copy_(output)
    return output
