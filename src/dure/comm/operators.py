"""Functional collectives as operators of torch: ``torch.ops.dure.all_reduce`` and seven more.

In a graph a call of an operator is a node: its arguments are tensors, numbers and strings. So an
operator takes the name of its group, as those of torch.distributed do, and finds the group when it
runs. While `torch.compile` reads a program, the group is a `CapturedGroup`.

Each operator runs a map (differentiable.py) and waits for it at once, because passes over a graph
may write to the input of a pending collective. The operator's *kernel* runs the map; its *fake*
implementation returns the shape of the result; its *gradient* is that of the map, which is an
operator again if a graph is being captured; under *vmap* the batch is an additional last dim.
Operators take and return single tensors: several tensors of a map are stacked, or joined.

If the shape of a result depends on the size of the group, the operator takes the size as
`num_ranks`: a graph that runs with a group of another size raises `UsageError`. `sizes` are the
lengths of the ranks' parts along `dim`; empty if they are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.node import has_side_effect

from dure.comm import differentiable as maps
from dure.comm.group import ProcessGroup
from dure.comm.ops import as_reduce_op
from dure.comm.world import group_named
from dure.errors import UsageError

_library = torch.library.Library("dure", "FRAGMENT")
Arguments = tuple[Any, ...]


def _sized(name: str, op: str, num_ranks: int) -> ProcessGroup:
    group = group_named(name, op)
    if group.size() != num_ranks:
        raise UsageError(
            "the graph was captured with a group of another size",
            op=op,
            group=name,
            rank=group.rank(),
            world_size=group.size(),
            seen=f"captured with {num_ranks} ranks, run with {group.size()}",
            fix="Capture the function again.",
        )
    return group


def call_operators(what: maps.Map, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a map as results of operators."""
    return what.captured(inputs)


def _run_one(what: maps.Map, tensor: torch.Tensor) -> torch.Tensor:
    return what.start((tensor,), False)[0][0]


def _gradient_of_one(what: maps.Map, grad: torch.Tensor) -> torch.Tensor:
    return what.gradients((grad,))[0]


def _same(tensor: torch.Tensor, *values: Any) -> Sequence[Any]:
    return tensor.shape


def _operator(
    name: str,
    parameters: str,
    map_of: Callable[..., maps.Map],
    shape_of: Callable[..., Sequence[Any]] = _same,
    run: Callable[[maps.Map, torch.Tensor], torch.Tensor] = _run_one,
    gradient: Callable[[maps.Map, torch.Tensor], torch.Tensor] = _gradient_of_one,
) -> None:
    """Define an operator; by default its result is one tensor, of the shape of its input.

    Args:
        name: In the namespace "dure".
        parameters: Those after the tensor, as in a schema.
        map_of: Returns the map for the values of `parameters`.
        shape_of: Returns the shape of the result for a tensor and these values.
        run: Returns the map's result.
        gradient: Returns the gradient of the input for that of the result.
    """
    schema = f"{name}(Tensor input, {parameters}) -> Tensor"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def kernel(tensor: torch.Tensor, *values: Any) -> torch.Tensor:
        return run(map_of(*values), tensor)

    def fake(tensor: torch.Tensor, *values: Any) -> torch.Tensor:
        map_of(*values)  # checks that the group exists and has the captured size
        return tensor.new_empty(shape_of(tensor, *values))

    def setup(ctx: Any, inputs: Arguments, output: torch.Tensor) -> None:
        ctx.values = inputs[1:]

    def backward(ctx: Any, grad: torch.Tensor) -> Arguments:
        return (gradient(map_of(*ctx.values), grad), *[None] * len(ctx.values))

    def batched(_: object, in_dims: Arguments, tensor: torch.Tensor, *values: Any) -> Any:
        return operator(tensor.movedim(in_dims[0], -1), *values), -1

    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dure::{name}", fake, lib=_library)
    torch.library.register_autograd(f"dure::{name}", backward, setup_context=setup, lib=_library)
    torch.library.register_vmap(f"dure::{name}", batched, lib=_library)
    operator = getattr(torch.ops.dure, name).default
    has_side_effect(operator)


def _all_reduce(reduce_op: str, group_name: str) -> maps.Map:
    return maps.AllReduce(group_named(group_name, "all_reduce"), as_reduce_op(reduce_op))


def _broadcast(src: int, group_name: str) -> maps.Map:
    group = group_named(group_name, "broadcast")
    return maps.Broadcast(group, group.peer(None, src, "broadcast", "src"))


def _reduce(reduce_op: str, dst: int, group_name: str) -> maps.Map:
    group = group_named(group_name, "reduce")
    return maps.Reduce(group, as_reduce_op(reduce_op), group.peer(None, dst, "reduce", "dst"))


def _gather(dst: int, num_ranks: int, group_name: str) -> maps.Map:
    group = _sized(group_name, "gather", num_ranks)
    return maps.Gather(group, group.peer(None, dst, "gather", "dst"))


def _scatter(src: int, group_name: str) -> maps.Map:
    group = group_named(group_name, "scatter")
    return maps.Scatter(group, group.peer(None, src, "scatter", "src"))


def _all_gather(dim: int, num_ranks: int, sizes: Sequence[int], group_name: str) -> maps.AllGather:
    return maps.AllGather(_sized(group_name, "all_gather", num_ranks), dim, tuple(sizes))


def _reduce_scatter(
    reduce_op: str, dim: int, num_ranks: int, sizes: Sequence[int], group_name: str
) -> maps.ReduceScatter:
    group = _sized(group_name, "reduce_scatter", num_ranks)
    return maps.ReduceScatter(group, as_reduce_op(reduce_op), dim, tuple(sizes))


def _all_to_all(takes: Sequence[int], gives: Sequence[int], group_name: str) -> maps.Map:
    if takes:
        group = _sized(group_name, "all_to_all", len(takes))
    else:
        group = group_named(group_name, "all_to_all")
    return maps.AllToAll(group, tuple(takes), tuple(gives))


def _resized(tensor: torch.Tensor, dim: int, size: Any) -> Sequence[Any]:
    return (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])


def _gathered(tensor: torch.Tensor, dim: int, n: int, sizes: Sequence[Any], name: str) -> Any:
    return _resized(tensor, dim, sum(sizes) if sizes else tensor.shape[dim] * n)


def _own_part(tensor: torch.Tensor, op: str, dim: int, *rest: Any) -> Sequence[Any]:
    what = _reduce_scatter(op, dim, *rest)
    return _resized(tensor, dim, what.own_size(tensor))


_operator("all_reduce", "str reduce_op, str group_name", _all_reduce)
_operator("broadcast", "int src, str group_name", _broadcast)
_operator("reduce", "str reduce_op, int dst, str group_name", _reduce)
_operator(
    "gather",
    "int dst, int num_ranks, str group_name",
    _gather,
    lambda x, dst, n, name: (n, *x.shape),
    lambda what, x: torch.stack(what.start((x,), False)[0]),
    lambda what, grad: what.gradients(grad.unbind(0))[0],
)
_operator(
    "scatter",
    "int src, str group_name",
    _scatter,
    lambda x, src, name: x.shape[1:],
    lambda what, x: what.start(x.unbind(0), False)[0][0],
    lambda what, grad: torch.stack(what.gradients((grad,))),
)
_operator(
    "all_gather",
    "int dim, int num_ranks, SymInt[] sizes, str group_name",
    _all_gather,
    _gathered,
)
_operator(
    "reduce_scatter",
    "str reduce_op, int dim, int num_ranks, SymInt[] sizes, str group_name",
    _reduce_scatter,
    _own_part,
)
_operator(
    "all_to_all",
    "SymInt[] output_split_sizes, SymInt[] input_split_sizes, str group_name",
    _all_to_all,
    lambda x, takes, gives, name: _resized(x, 0, sum(takes) if takes else x.shape[0]),
)
