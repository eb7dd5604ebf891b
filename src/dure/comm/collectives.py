"""The collectives, with the names, arguments and meaning of torch.distributed.

With ``async_op=False`` a collective returns None when the result is in place; with
``async_op=True`` it returns a `Work` at once, and the tensors belong to the operation until that
has ended. For all of them:

* *Collective*: every rank of the group calls, in the same order relative to the group's other
  collectives. If a rank does not call, the others raise `CommTimeout`, which names it, or
  `PeerLost`, if it died; ranks that call different things all raise `Desync`.
* *Raises*: `UsageError` and its subclasses (`ShapeError`, `DtypeError`, `DeviceError`,
  `NotInGroupError`) for errors that this rank alone can find, before anything is sent.
* *Memory*: inputs are read before outputs are written. An input may overlap an output; it is copied
  first, unless it is the memory that MPI_IN_PLACE would name. Contiguous outputs that overlap each
  other are a `ShapeError`. Operations that run at the same time (asynchronous ones, and those in
  one coalescing manager) must not share a tensor that one of them writes.
* *Autograd*: autograd sees a result as an in-place change of its tensor: a backward pass that needs
  the old value raises, as after `Tensor.add_`.
* *Shapes*: inputs and outputs may be strided. `n` is the number of ranks, `S` the bytes of the
  tensor named in Cost. Costs are those of the shm backend, per rank.
* *Numerics*: reductions run in the order of ranks, so results are bitwise equal on all ranks and
  from run to run. 16 and 8 bit floats accumulate in float32 and are rounded once (over nccl,
  floats of 16 bits as NCCL does).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta

import torch

from dure.comm.capture import out_of_graphs
from dure.comm.group import ProcessGroup
from dure.comm.ops import ReduceOp
from dure.comm.work import Work, combine
from dure.comm.world import resolve
from dure.errors import ShapeError

Tensors = Sequence[torch.Tensor]


def all_reduce(
    tensor: torch.Tensor,
    op: object = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `tensor` of all ranks, in place; all ranks end with the same values.

    Args:
        tensor: Input and output. Sparse COO tensors are summed too.
        op: How to combine: a member of `ReduceOp`.
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Shapes:
        tensor [*]: the same shape and dtype on all ranks.

    Cost:
        2 steps; S bytes written to shared memory, S read, in slices of S/n reduced by one rank.

    Example:
        ```python
        x = torch.full((3,), dist.get_rank() + 1.0)  # 1 on rank 0, 2 on rank 1
        dist.all_reduce(x)
        assert x.tolist() == [3.0, 3.0, 3.0]  # on 2 ranks
        ```
    """
    return resolve(group, "all_reduce").all_reduce(tensor, op, async_op, True)


def all_reduce_coalesced(
    tensors: Tensors,
    op: object = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine each of several tensors, as `all_reduce` does one.

    Args:
        tensors: Inputs and outputs.
        op: How to combine: a member of `ReduceOp`.
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Shapes:
        tensors: any number, the same on all ranks; each as for `all_reduce`.

    Cost:
        That of one `all_reduce` for each tensor.

    Example:
        ```python
        weight, bias = torch.ones(2, 2), torch.ones(2)
        dist.all_reduce_coalesced([weight, bias], op=dist.ReduceOp.AVG)
        assert weight.sum() == 4 and bias.sum() == 2
        ```
    """
    pg = resolve(group, "all_reduce_coalesced")
    return pg.all_reduce_coalesced(tensors, op, async_op, True)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: object = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Combine `tensor` of all ranks into that of `dst`; the others' are left as they are.

    Args:
        tensor: Input, and on `dst` output.
        dst: Global rank of the rank that receives the result.
        op: How to combine: a member of `ReduceOp`.
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.
        group_dst: The same as a rank of the group, in place of `dst`.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Shapes:
        tensor [*]: the same shape and dtype on all ranks.

    Cost:
        2 steps; S bytes written by each rank.

    Example:
        ```python
        loss = torch.tensor(dist.get_rank() + 1.0)
        dist.reduce(loss, dst=0)
        if dist.get_rank() == 0:
            assert loss.item() == 3.0  # on 2 ranks
        ```
    """
    pg = resolve(group, "reduce")
    return pg.reduce(tensor, pg.peer(dst, group_dst, "reduce", "dst"), op, async_op, True)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy `tensor` of `src` to all ranks.

    Args:
        tensor: Input on `src`, output on the others.
        src: Global rank of the rank that sends.
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.
        group_src: The same as a rank of the group, in place of `src`.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Shapes:
        tensor [*]: the same number of elements and dtype on all ranks.

    Cost:
        1 step; S bytes written by the root, S read by every other rank.

    Example:
        ```python
        seed = torch.tensor([7 if dist.get_rank() == 0 else 0])
        dist.broadcast(seed, src=0)
        assert seed.item() == 7
        ```
    """
    pg = resolve(group, "broadcast")
    return pg.broadcast(tensor, pg.peer(src, group_src, "broadcast", "src"), async_op, True)


def all_gather(
    tensor_list: Tensors,
    tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Copy rank i's `tensor` into `tensor_list[i]` on all ranks.

    Args:
        tensor_list: Outputs, one for each rank.
        tensor: Input.
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Shapes:
        tensor [k_i]: lengths may differ from rank to rank.
        tensor_list: n tensors; the i-th has k_i elements.

    Cost:
        1 step; each rank writes its own S bytes and reads those of the others.

    Example:
        ```python
        mine = torch.full((2,), dist.get_rank())
        all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of_them, mine)
        assert [t.tolist() for t in all_of_them] == [[0, 0], [1, 1]]  # on 2 ranks
        ```
    """
    return resolve(group, "all_gather").all_gather(tensor_list, tensor, async_op, True)


def all_gather_single(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Copy the `input_tensor` of all ranks, one behind the other, into `output_tensor`.

    Args:
        output_tensor: Output.
        input_tensor: Input.
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Shapes:
        input_tensor [k]: the same number of elements on all ranks.
        output_tensor [n*k], or [n, k].

    Cost:
        As `all_gather`.

    Example:
        ```python
        mine = torch.full((2,), dist.get_rank())
        every = torch.empty(2 * dist.get_world_size(), dtype=mine.dtype)
        dist.all_gather_single(every, mine)
        assert every.tolist() == [0, 0, 1, 1]  # on 2 ranks
        ```
    """
    pg = resolve(group, "all_gather_single")
    return pg.all_gather_single(output_tensor, input_tensor, async_op, True)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Tensors],
    input_tensor_list: Tensors,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather several tensors of each rank at once.

    Args:
        output_tensor_lists: Outputs: list i receives rank i's tensors.
        input_tensor_list: Inputs.
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Shapes:
        input_tensor_list: m tensors of any shapes, the same on all ranks.
        output_tensor_lists: n lists of m tensors.

    Cost:
        That of one `all_gather` for each tensor of a rank.

    Example:
        ```python
        mine = [torch.full((2,), dist.get_rank()), torch.full((1,), dist.get_rank())]
        lists = [[torch.empty_like(t) for t in mine] for _ in range(dist.get_world_size())]
        dist.all_gather_coalesced(lists, mine)
        assert [t.tolist() for t in lists[1]] == [[1, 1], [1]]
        ```
    """
    pg = resolve(group, "all_gather_coalesced")
    if len(output_tensor_lists) != pg.size() or any(
        len(row) != len(input_tensor_list) for row in output_tensor_lists
    ):
        raise ShapeError(
            "output_tensor_lists must hold one list for each rank, as long as input_tensor_list",
            op="all_gather_coalesced",
            seen=f"{[len(row) for row in output_tensor_lists]} for {pg.size()} ranks and "
            f"{len(input_tensor_list)} inputs",
        )
    calls = list(zip(zip(*output_tensor_lists, strict=True), input_tensor_list, strict=True))
    outputs = [t for row in output_tensor_lists for t in row]
    with nullcontext() if async_op else pg.hold("all_gather_coalesced"):
        works = [pg.all_gather(row, t, async_op or not pg.runs_plain, True) for row, t in calls]
        return combine([w for w in works if w is not None], outputs, async_op)


def gather(
    tensor: torch.Tensor,
    gather_list: Tensors | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copy rank i's `tensor` into `gather_list[i]` on `dst`.

    Args:
        tensor: Input.
        gather_list: Outputs on `dst`, one for each rank; None or empty elsewhere.
        dst: Global rank of the rank that receives; the group's first if None.
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.
        group_dst: The same as a rank of the group, in place of `dst`.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Shapes:
        tensor [k_i]: lengths may differ from rank to rank.
        gather_list: n tensors, the i-th of k_i elements.

    Cost:
        1 step; each rank but the root writes its S bytes.

    Example:
        ```python
        mine = torch.full((2,), dist.get_rank())
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.gather(mine, every if dist.get_rank() == 0 else None, dst=0)
        if dist.get_rank() == 0:
            assert [t.tolist() for t in every] == [[0, 0], [1, 1]]  # on 2 ranks
        ```
    """
    pg = resolve(group, "gather")
    root = pg.root(dst, group_dst, "gather", "dst")
    return pg.gather(tensor, gather_list, root, async_op, True)


def scatter(
    tensor: torch.Tensor,
    scatter_list: Tensors | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy `scatter_list[i]` of `src` to rank i's `tensor`.

    Args:
        tensor: Output.
        scatter_list: Inputs on `src`, one for each rank; None or empty elsewhere.
        src: Global rank of the rank that sends; the group's first if None.
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.
        group_src: The same as a rank of the group, in place of `src`.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Shapes:
        tensor [k_i]: lengths may differ from rank to rank.
        scatter_list: n tensors, the i-th of k_i elements.

    Cost:
        1 step; the root writes the parts of all others.

    Example:
        ```python
        mine, rank = torch.empty(2), dist.get_rank()
        parts = [torch.full((2,), float(r)) for r in range(dist.get_world_size())]
        dist.scatter(mine, parts if rank == 0 else None, src=0)
        assert mine.tolist() == [rank, rank]
        ```
    """
    pg = resolve(group, "scatter")
    root = pg.root(src, group_src, "scatter", "src")
    return pg.scatter(tensor, scatter_list, root, async_op, True)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Tensors,
    op: object = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `input_list[i]` of all ranks into the `output` of rank i.

    Args:
        output: Output.
        input_list: Inputs, one for each rank.
        op: How to combine: a member of `ReduceOp`.
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Shapes:
        input_list: n tensors; the i-th has k_i elements, the same on all ranks.
        output [k_r] on rank r.

    Cost:
        1 step; each rank writes (n-1)/n of its input and reduces its own part.

    Example:
        ```python
        parts = [torch.full((2,), float(r)) for r in range(dist.get_world_size())]
        mine = torch.empty(2)
        dist.reduce_scatter(mine, parts)
        assert mine.tolist() == [2.0 * dist.get_rank()] * 2  # on 2 ranks
        ```
    """
    return resolve(group, "reduce_scatter").reduce_scatter(output, input_list, op, async_op, True)


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,
    op: object = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine part i of every rank's `input` into the `output` of rank i.

    Args:
        output: Output.
        input: Input, the parts for all ranks one behind the other.
        op: How to combine: a member of `ReduceOp`.
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Shapes:
        input [n*k], or [n, k]: the same on all ranks.
        output [k].

    Cost:
        As `reduce_scatter`.

    Example:
        ```python
        parts = torch.arange(2.0 * dist.get_world_size())
        mine = torch.empty(2)
        dist.reduce_scatter_single(mine, parts, op=dist.ReduceOp.MAX)
        assert mine.tolist() == [2.0 * dist.get_rank(), 2.0 * dist.get_rank() + 1]
        ```
    """
    pg = resolve(group, "reduce_scatter_single")
    return pg.reduce_scatter_single(output, input, op, async_op, True)


def all_to_all(
    output_tensor_list: Tensors,
    input_tensor_list: Tensors,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Copy `input_tensor_list[j]` of rank i into `output_tensor_list[i]` of rank j.

    Args:
        output_tensor_list: Outputs, one for each rank.
        input_tensor_list: Inputs, one for each rank.
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Shapes:
        n tensors each; the tensor from i to j has the same length on both ranks.

    Cost:
        1 step; each rank writes (n-1)/n of its input.

    Example:
        ```python
        rank, n = dist.get_rank(), dist.get_world_size()
        sent = [torch.tensor([10 * rank + peer]) for peer in range(n)]
        received = [torch.empty_like(t) for t in sent]
        dist.all_to_all(received, sent)
        assert [t.item() for t in received] == [10 * peer + rank for peer in range(n)]
        ```
    """
    pg = resolve(group, "all_to_all")
    return pg.all_to_all(output_tensor_list, input_tensor_list, async_op, True)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Exchange rows of `input`: part j goes to rank j, part i of `output` comes from rank i.

    Args:
        output: Output.
        input: Input.
        output_split_sizes: Rows expected from each rank; equal parts if None.
        input_split_sizes: Rows for each rank; equal parts if None.
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Shapes:
        input [sum(input_split_sizes), *], output [sum(output_split_sizes), *].

    Cost:
        As `all_to_all`.

    Example:
        ```python
        rank = dist.get_rank()  # on 2 ranks: rank 0 sends 1 row to each, rank 1 sends 2
        sent = torch.full((2 * (rank + 1), 3), float(rank))
        received = torch.empty(3, 3)
        dist.all_to_all_single(received, sent, [1, 2], [rank + 1, rank + 1])
        assert received[:, 0].tolist() == [0.0, 1.0, 1.0]
        ```
    """
    pg = resolve(group, "all_to_all_single")
    return pg.all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, async_op, True
    )


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: object = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Return when all ranks of the group have called.

    Args:
        group: The ranks that take part; the default group if None.
        async_op: Return at once, with a `Work` to wait for.
        device_ids: Accepted for torch's sake, and ignored.
        timeout: A limit for this call, as a timedelta or in seconds, shorter than the group's
            timeout, which applies as well.

    Returns:
        None when the result is in place; with `async_op` a `Work`.

    Raises:
        UsageError: An argument is wrong on this rank (`ShapeError`, ...); nothing was sent.
        CommError: The operation failed (`PeerLost`, `CommTimeout`, `Desync`, ...).

    Cost:
        1 step, no data.

    Example:
        ```python
        if dist.get_rank() == 0:
            Path("prepared").touch()
        dist.barrier()
        assert Path("prepared").exists()
        ```
    """
    return resolve(group, "barrier").barrier(async_op, timeout)


out_of_graphs(all_reduce, all_reduce_coalesced, reduce, broadcast, barrier)
out_of_graphs(all_gather, all_gather_single, all_gather_coalesced, gather, scatter)
out_of_graphs(reduce_scatter, reduce_scatter_single, all_to_all, all_to_all_single)
