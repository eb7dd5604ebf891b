"""The collectives, under the names, arguments and meaning of torch.distributed.

Each takes `group` (None: the default group) and `async_op`. With ``async_op=False`` it returns None
when the result is in place; with ``async_op=True`` it returns a `Work` at once, and the tensors
belong to the operation until that has ended. Roots (`src`, `dst`) are global ranks; `group_src` and
`group_dst` are ranks of the group, given in their place.

What holds for all of them:

* *Collective*: every rank of the group calls, in the same order relative to the group's other
  collectives. A rank that does not come makes the others raise `CommTimeout` (it is named) or
  `PeerLost` (it died); ranks that call different things all raise `Desync`.
* *Raises*: `UsageError` and its kinds (`ShapeError`, `DtypeError`, `DeviceError`,
  `NotInGroupError`) for what this rank alone can know to be wrong, before anything is sent.
* *Memory*: inputs are read before outputs are written. An input may overlap an output; it is copied
  first, unless it is the memory that MPI_IN_PLACE would name. Outputs that overlap each other are a
  `ShapeError`, and so are tensors of two operations in one coalescing manager if one writes them.
* *Autograd*: autograd sees a result as an in-place change of its tensor: a backward pass that needs
  the old value raises, as after `Tensor.add_`.
* *Shapes*: tensors may be strided; outputs may be too. `n` is the number of ranks, `S` the bytes
  of the tensor named in Cost. Costs are those of the shm backend, for one rank.
* *Numerics*: reductions run in the order of ranks, so results are bitwise equal on all ranks and
  from run to run. 16 and 8 bit floats accumulate in float32 and are rounded once (over nccl,
  floats of 16 bits as NCCL does).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch

from dure.comm.capture import out_of_graphs
from dure.comm.group import ProcessGroup
from dure.comm.ops import ReduceOp
from dure.comm.overlap import check_calls_apart
from dure.comm.work import Work, combine
from dure.comm.world import resolve
from dure.errors import ShapeError, UsageError

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
        op: A member of `ReduceOp`.

    Shapes:
        tensor [*]: the same shape and dtype on all ranks.

    Cost:
        2 steps; S bytes written to shared memory, S read, in slices of S/n reduced by one rank.
    """
    return resolve(group, "all_reduce").all_reduce(tensor, op, async_op, True)


def all_reduce_coalesced(
    tensors: Tensors,
    op: object = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine each of several tensors, as `all_reduce` does one.

    Shapes:
        tensors: any number, the same on all ranks.
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

    Shapes:
        tensor [*]: the same shape and dtype on all ranks.

    Cost:
        2 steps; S bytes written by each rank.
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

    Shapes:
        tensor [*]: the same number of elements and dtype on all ranks.

    Cost:
        1 step; S bytes written by the root, S read by every other rank.
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

    Shapes:
        tensor [k_i]: lengths may differ from rank to rank.
        tensor_list: n tensors; the i-th has k_i elements.

    Cost:
        1 step; each rank writes its own S bytes and reads those of the others.
    """
    return resolve(group, "all_gather").all_gather(tensor_list, tensor, async_op, True)


def all_gather_single(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Copy the `input_tensor` of all ranks, one behind the other, into `output_tensor`.

    Shapes:
        input_tensor [k]: the same number of elements on all ranks.
        output_tensor [n*k], or [n, k].

    Cost:
        As `all_gather`.
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

    Shapes:
        input_tensor_list: m tensors of any shapes, the same on all ranks.
        output_tensor_lists: n lists of m tensors; list i receives rank i's tensors.
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
    check_calls_apart([(row, (t,)) for row, t in calls], "all_gather_coalesced")
    outputs = [t for row in output_tensor_lists for t in row]
    with nullcontext() if async_op else pg.hold("all_gather_coalesced"):
        works = [pg.all_gather(row, t, True, True) for row, t in calls]
        return combine([w for w in works if w is not None], outputs, async_op)


def gather(
    tensor: torch.Tensor,
    gather_list: Tensors | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copy rank i's `tensor` into `gather_list[i]` on `dst` (the group's first rank by default).

    Shapes:
        tensor [k_i]: lengths may differ from rank to rank.
        gather_list: On `dst` n tensors, the i-th of k_i elements. Elsewhere None or empty.

    Cost:
        1 step; each rank but the root writes its S bytes.
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
    """Copy `scatter_list[i]` of `src` (the group's first rank by default) to rank i's `tensor`.

    Shapes:
        tensor [k_i]: lengths may differ from rank to rank.
        scatter_list: On `src` n tensors, the i-th of k_i elements. Elsewhere None or empty.

    Cost:
        1 step; the root writes the parts of all others.
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

    Shapes:
        input_list: n tensors; the i-th has k_i elements, the same on all ranks.
        output [k_r] on rank r.

    Cost:
        1 step; each rank writes (n-1)/n of its input and reduces its own part.
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

    Shapes:
        input [n*k], or [n, k]: the same on all ranks.
        output [k].

    Cost:
        As `reduce_scatter`.
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

    Shapes:
        n tensors each; what i sends to j has the length that j expects from i.

    Cost:
        1 step; each rank writes (n-1)/n of its input.
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
        output_split_sizes: Rows expected from each rank; equal parts where None.
        input_split_sizes: Rows for each rank; equal parts where None.

    Shapes:
        input [sum(input_split_sizes), *], output [sum(output_split_sizes), *].

    Cost:
        As `all_to_all`.
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
        device_ids: Accepted for torch's sake; devices need no help here.
        timeout: A limit for this call, shorter than the group's timeout, which holds as well.

    Cost:
        1 step, no data.
    """
    return resolve(group, "barrier").barrier(async_op, timeout)


out_of_graphs(all_reduce, all_reduce_coalesced, reduce, broadcast, barrier)
out_of_graphs(all_gather, all_gather_single, all_gather_coalesced, gather, scatter)
out_of_graphs(reduce_scatter, reduce_scatter_single, all_to_all, all_to_all_single)


class Coalesced:
    """What `coalescing_manager` yields: the operations started in it."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def wait(self) -> None:
        """Wait for all of them; the first error is raised."""
        combine(self.works, [], False)


class _Manager(AbstractContextManager[Coalesced, None]):
    """What `coalescing_manager` returns; not a generator, so that call sites are the program's."""

    def __init__(self, group: ProcessGroup, async_ops: bool) -> None:
        self._group, self._async_ops = group, async_ops
        self._hold, self._yielded = group.hold("coalescing_manager"), Coalesced()

    def __enter__(self) -> Coalesced:
        pg = self._group
        self._hold.__enter__()
        if pg.coalesced is not None:
            raise UsageError(
                "coalescing managers of one group cannot be nested", group=pg.group_name
            )
        pg.coalesced = self._yielded.works
        return self._yielded

    def __exit__(self, *error: object) -> None:
        try:
            self._group.coalesced = None
            if error[0] is not None:
                for work in self._yielded.works:  # the program cannot wait for them
                    work.disown()
            elif not self._async_ops:
                self._yielded.wait()
        finally:
            self._hold.__exit__()


def coalescing_manager(
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    async_ops: bool = False,
) -> AbstractContextManager[Coalesced]:
    """Start the operations called in the block without waiting, and wait for all at its end.

    Until it exits, other threads cannot call collectives of the group, as during one operation.

    Args:
        group: Whose operations; those of other groups are not touched.
        device: Accepted for torch's sake; not needed.
        async_ops: Whether to leave the waiting to the caller (`.wait()` of what is yielded).

    Raises:
        UsageError: Managers of one group were nested, or another thread was inside a call.
        CommError: One of the operations failed.

    Collective:
        As the operations within: all ranks, in the same order.
    """
    return _Manager(resolve(group, "coalescing_manager"), async_ops)
