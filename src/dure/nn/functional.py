"""Collectives that autograd understands, with the arguments of torch.distributed.nn.functional.

Each returns its result and does not change its inputs; gradients are those of the sum of all ranks'
losses, of any order (comm/differentiable.py). Results are waited for at their first use, as those
of `dure.comm.functional`, which can also gather and scatter along other dims. If the caller passes
memory for the result (`reduce_scatter`, `all_to_all`, `all_to_all_single`) it is complete when the
function returns.

Every rank of the group calls, and runs the same backward: either all ranks' inputs require
gradients or none's. Roots are global ranks. `group` is as in `dure.comm.functional`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.comm import differentiable as maps
from dure.comm import functional
from dure.comm.checks import as_splits, check_list
from dure.comm.functional import Group, group_of
from dure.comm.ops import ReduceOp

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

Tensors = tuple[torch.Tensor, ...]


def all_reduce(
    tensor: torch.Tensor, op: object = ReduceOp.SUM, group: Group = None
) -> torch.Tensor:
    """Return the reduction of all ranks' `tensor`; SUM, AVG and premultiplied sums have gradients.

    Args:
        tensor: This rank's part.
        op: How to combine: a member of `ReduceOp`.
        group: The ranks that take part; the default group if None.

    Returns:
        A new tensor; `tensor` is left as it is.

    Raises:
        UsageError: An argument is wrong on this rank; nothing was sent.
        CommError: The operation failed.

    Shapes:
        tensor [*] on all ranks; result [*].

    Example:
        ```python
        from dure.nn import functional as nn_functional

        x = torch.tensor([dist.get_rank() + 1.0], requires_grad=True)
        total = nn_functional.all_reduce(x)
        assert total.item() == 3.0  # 1 + 2 on 2 ranks
        total.sum().backward()
        assert x.grad.item() == 2.0  # each of the 2 sums depends on x
        ```
    """
    return functional.all_reduce(tensor, op, group)


def broadcast(tensor: torch.Tensor, src: int, group: Group = None) -> torch.Tensor:
    """Return the `tensor` of `src`; its gradient is the sum of all ranks', zero on other ranks.

    Args:
        tensor: What `src` sends; on other ranks only its shape and dtype count.
        src: Global rank of the sender.
        group: The ranks that take part; the default group if None.

    Returns:
        A new tensor.

    Shapes:
        tensor [*] on all ranks; result [*].

    Example:
        ```python
        x = torch.tensor([dist.get_rank() + 1.0])
        assert nn_functional.broadcast(x, src=1).item() == 2.0
        ```
    """
    pg = group_of(group, "broadcast")
    return maps.apply(maps.Broadcast(pg, pg.peer(src, None, "broadcast", "src")), tensor)[0]


def reduce(
    tensor: torch.Tensor, dst: int, op: object = ReduceOp.SUM, group: Group = None
) -> torch.Tensor:
    """Return the reduction of all ranks' `tensor` on `dst`, and zeros on other ranks.

    Args:
        tensor: This rank's part.
        dst: Global rank of the rank that receives the result.
        op: How to combine: a member of `ReduceOp`.
        group: The ranks that take part; the default group if None.

    Returns:
        A new tensor.

    Shapes:
        tensor [*] on all ranks; result [*].

    Example:
        ```python
        total = nn_functional.reduce(torch.ones(2), dst=0)
        assert total.tolist() == ([2.0, 2.0] if dist.get_rank() == 0 else [0.0, 0.0])
        ```
    """
    pg = group_of(group, "reduce")
    tensor, reduction = maps.summed(tensor, op)
    return maps.apply(maps.Reduce(pg, reduction, pg.peer(dst, None, "reduce", "dst")), tensor)[0]


def gather(tensor: torch.Tensor, dst: int = 0, group: Group = None) -> Tensors:
    """Return the tensors of all ranks on `dst`, and zeros on other ranks.

    Args:
        tensor: This rank's part.
        dst: Global rank of the rank that receives all parts.
        group: The ranks that take part; the default group if None.

    Returns:
        New tensors, in the order of ranks.

    Shapes:
        tensor [*] on all ranks; result n times [*].

    Example:
        ```python
        first, second = nn_functional.gather(torch.tensor([dist.get_rank() + 1.0]), dst=0)
        assert (first.item(), second.item()) == ((1.0, 2.0) if dist.get_rank() == 0 else (0.0, 0.0))
        ```
    """
    pg = group_of(group, "gather")
    return maps.apply(maps.Gather(pg, pg.peer(dst, None, "gather", "dst")), tensor)


def scatter(tensors: Sequence[torch.Tensor], src: int = 0, group: Group = None) -> torch.Tensor:
    """Return ``tensors[r]`` of `src` on rank r; on other ranks `tensors` only give the shape.

    Args:
        tensors: One for each rank.
        src: Global rank of the sender.
        group: The ranks that take part; the default group if None.

    Returns:
        A new tensor.

    Shapes:
        tensors n times [*], on all ranks; result [*].

    Example:
        ```python
        mine = nn_functional.scatter([torch.tensor([1.0]), torch.tensor([2.0])], src=0)
        assert mine.item() == dist.get_rank() + 1
        ```
    """
    pg = group_of(group, "scatter")
    given = check_list(tensors, pg.size(), "scatter", "tensors")
    return maps.apply(maps.Scatter(pg, pg.peer(src, None, "scatter", "src")), *given)[0]


def all_gather(tensor: torch.Tensor, group: Group = None) -> Tensors:
    """Return the tensors of all ranks.

    Args:
        tensor: This rank's part.
        group: The ranks that take part; the default group if None.

    Returns:
        New tensors, in the order of ranks.

    Shapes:
        tensor [*] on all ranks; result n times [*].

    Example:
        ```python
        parts = nn_functional.all_gather(torch.tensor([dist.get_rank() + 1.0]))
        assert [part.item() for part in parts] == [1.0, 2.0]
        ```
    """
    pg = group_of(group, "all_gather")
    return maps.apply(maps.AllGatherList(pg, (tensor.shape,) * pg.size()), tensor)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: object = ReduceOp.SUM,
    group: Group = None,
) -> torch.Tensor:
    """Fill `output` with the reduction of all ranks' ``input_list[r]``, and return it.

    Args:
        output: Receives the result.
        input_list: One tensor for each rank.
        op: How to combine: a member of `ReduceOp`.
        group: The ranks that take part; the default group if None.

    Returns:
        `output`.

    Shapes:
        input_list n tensors; the i-th [k_i, *] is the same on all ranks; output and result as the
        r-th.

    Example:
        ```python
        inputs = [torch.tensor([1.0]), torch.tensor([5.0])]
        mine = nn_functional.reduce_scatter(torch.empty(1), inputs)
        assert mine.item() == (2.0 if dist.get_rank() == 0 else 10.0)
        ```
    """
    pg = group_of(group, "reduce_scatter")
    given = check_list(input_list, pg.size(), "reduce_scatter", "input_list")
    scaled = [maps.summed(t, op) for t in given]
    shapes = tuple(t.shape for t in given)
    what = maps.ReduceScatterList(pg, scaled[0][1], shapes, into=output)
    return maps.apply(what, *(t for t, _ in scaled), wait=True)[0]


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: Group = None,
) -> Tensors:
    """Fill ``output_tensor_list[i]`` with ``input_tensor_list[r]`` of rank i; return them.

    Args:
        output_tensor_list: Receive the results.
        input_tensor_list: One tensor for each rank.
        group: The ranks that take part; the default group if None.

    Returns:
        `output_tensor_list`, as a tuple.

    Shapes:
        n tensors each; what i sends to j has the shape that j expects from i.

    Example:
        ```python
        rank = dist.get_rank()
        sent = [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])]
        received = nn_functional.all_to_all([torch.empty(1), torch.empty(1)], sent)
        assert [x.item() for x in received] == [float(rank), 10.0 + rank]
        ```
    """
    pg = group_of(group, "all_to_all")
    outputs = check_list(output_tensor_list, pg.size(), "all_to_all", "output_tensor_list")
    inputs = check_list(input_tensor_list, pg.size(), "all_to_all", "input_tensor_list")
    takes, gives = tuple(t.shape for t in outputs), tuple(t.shape for t in inputs)
    return maps.apply(maps.AllToAllList(pg, takes, gives, tuple(outputs)), *inputs, wait=True)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Fill `output` with the rows that all ranks send to this one, and return it.

    Args:
        output: Receives the result.
        input: The rows for all ranks, in their order.
        output_split_sizes: Rows expected from each rank; equal parts if None.
        input_split_sizes: Rows for each rank; equal parts if None.
        group: The ranks that take part; the default group if None.

    Returns:
        `output`.

    Shapes:
        input [sum(input_split_sizes), *], output and result [sum(output_split_sizes), *]; equal
        parts without split sizes.

    Example:
        ```python
        rank = dist.get_rank()
        sent = torch.tensor([10.0 * rank, 10.0 * rank + 1])
        received = nn_functional.all_to_all_single(torch.empty(2), sent)
        assert received.tolist() == [float(rank), 10.0 + rank]
        ```
    """
    name = "all_to_all_single"
    pg = group_of(group, name)
    takes = tuple(as_splits(output_split_sizes, name, "output"))
    gives = tuple(as_splits(input_split_sizes, name, "input"))
    return maps.apply(maps.AllToAll(pg, takes, gives, output), input, wait=True)[0]
