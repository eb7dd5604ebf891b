"""Functional collectives: out of place, differentiable, and waited for when they are used.

Names, arguments and meaning are those of torch.distributed._functional_collectives. Inputs are not
changed; a new tensor is returned at once, while the collective runs. The first use of its values
waits for them (pending.py), so computation in between overlaps with the communication. Until then
the *input* must not be changed in place: the collective may still read it.

*Groups.* `group` is a `ProcessGroup`, its name, the list of its global ranks (of a group that
exists), None for the default group; or a mesh: an object with ``get_group(axis)``, alone if it has
one axis, else as ``(mesh, axis)``. It is looked up when the function is called; backward uses the
same group, on any thread.

*Ranks* given here (`src`, `src_dst`) are ranks of the group. `tag` is accepted for torch's sake.

*Gradients* are those of the sum of all ranks' losses (differentiable.py), of any order. Every rank
must run the same backward: either all ranks' inputs require gradients or none's.

*Graphs.* While a graph is captured (make_fx, torch.export, torch.jit.trace, torch.compile also with
``fullgraph=True``), on tensors without values (`FakeTensorMode`) and under torch.func.vmap, each
function calls operators of torch (operators.py), which are nodes of the graph. Their results are
complete at once, in compiled code too. A graph finds its group by name when it runs.

Collective, Raises, Cost and Numerics are as for the functions of these names in collectives.py.
Errors of the communication are raised when a result is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

import dure.comm.operators  # noqa: F401 (it defines torch.ops.dure)  # pyright: ignore
from dure.comm import differentiable as maps
from dure.comm.checks import as_splits
from dure.comm.group import ProcessGroup
from dure.comm.pending import AsyncCollectiveTensor, wait_tensor
from dure.comm.untraced import constant
from dure.comm.world import current_world, group_named, resolve
from dure.errors import ShapeError, UsageError

__all__ = [
    "AsyncCollectiveTensor",
    "Group",
    "HasGroup",
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "group_of",
    "permute_tensor",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "wait_tensor",
]


@runtime_checkable
class HasGroup(Protocol):
    """The methods of a mesh that a collective uses.

    Example:
        ```python
        from dure.comm import functional as funcol

        mesh = dist.init_device_mesh("cpu", (2,))
        assert isinstance(mesh, funcol.HasGroup)
        ```
    """

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the group of this rank along an axis; None if there is only one."""
        ...


Group = (
    ProcessGroup
    | str
    | Sequence[int]
    | HasGroup
    | tuple[HasGroup, int]
    | tuple[HasGroup, str]
    | None
)
"""The types of `group`."""


def group_of(group: Group, op: str) -> ProcessGroup:
    """Return the group for an argument `group`.

    Args:
        group: A group, its name, a list of global ranks, a mesh of one axis, or a mesh and
            one of its axes (number or name); the default group if None.
        op: The name of the operation, for error messages.

    Returns:
        The group.

    Raises:
        UsageError: No group of this rank has these ranks, or this name; or it is none of the forms.
        NotInGroupError: This rank is not a member.

    Example:
        ```python
        from dure.comm import functional as funcol

        assert funcol.group_of([0, 1], "all_reduce").size() == 2
        ```
    """
    if torch.compiler.is_dynamo_compiling():
        return _group_to_compile(group, op)
    if group is None or isinstance(group, ProcessGroup):
        return resolve(group, op)
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], HasGroup):
        return resolve(group[0].get_group(group[1]), op)  # pyright: ignore[reportArgumentType]
    if isinstance(group, HasGroup):
        return resolve(group.get_group(), op)
    if isinstance(group, str):
        return group_named(group, op)
    if isinstance(group, (list, tuple)):
        return _group_of_ranks(tuple(group), op)
    return resolve(group, op)


def _group_of_ranks(ranks: tuple[Any, ...], op: str) -> ProcessGroup:
    """Return the oldest group of these ranks, which is the same on all of them."""
    world = current_world()
    world.need_default()
    for group in world.groups.values():
        if group.global_ranks == ranks:
            return group
    raise UsageError(
        f"this rank has no group of ranks {list(ranks)}",
        op=op,
        fix="Make the group first, with dure.new_group, on all ranks.",
    )


@dataclass(frozen=True, slots=True)
class CapturedGroup:
    """A group as constants, for `torch.compile`."""

    group_name: str
    num_ranks: int
    own_rank: int

    def size(self) -> int:
        """Return how many ranks the group has."""
        return self.num_ranks

    def rank(self) -> int:
        """Return this rank's number within the group."""
        return self.own_rank

    def peer(self, global_rank: int | None, group_rank: int | None, op: str, what: str) -> int:
        """Return as `ProcessGroup.peer` does."""
        return _peer(self.group_name, global_rank, group_rank, op, what)


def _group_to_compile(group: Group, op: str) -> Any:
    """Return a `CapturedGroup`; the compiler runs this, with constants of `constant` functions."""
    if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
        mesh: Any = group[0]
        return CapturedGroup(*_constants_on_axis(mesh, group[1], op))
    return CapturedGroup(*_constants_of(group, op))


@constant
def _constants_of(group: Group, op: str) -> tuple[str, int, int]:
    found = group_of(group, op)
    return found.group_name, found.size(), found.rank()


@constant
def _constants_on_axis(mesh: HasGroup, axis: Any, op: str) -> tuple[str, int, int]:
    return _constants_of((mesh, axis), op)


@constant
def _peer(
    group_name: str, global_rank: int | None, group_rank: int | None, op: str, what: str
) -> int:
    return group_named(group_name, op).peer(global_rank, group_rank, op, what)


def _dim(tensor: torch.Tensor, dim: int, op: str) -> int:
    """Return `dim` counted from the front."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ShapeError(
            "the tensor has no such dim", op=op, seen=f"dim {dim} of shape {tuple(tensor.shape)}"
        )
    return dim % tensor.dim()


def all_reduce(
    tensor: torch.Tensor, reduceOp: object, group: Group = None, tag: str = ""
) -> torch.Tensor:
    """Return the reduction of all ranks' `tensor`.

    Args:
        reduceOp: "sum", "avg", "min", ... or a member of `ReduceOp`. SUM, AVG and premultiplied
            sums have gradients.

    Returns:
        A new tensor.

    Raises:
        UsageError: An argument is wrong on this rank; nothing was sent.
        CommError: The operation failed; raised when the result is first used.

    Shapes:
        tensor [*] on all ranks; result [*].

    Example:
        ```python
        mine = torch.tensor([dist.get_rank() + 1.0])  # 1 on rank 0, 2 on rank 1
        total = funcol.all_reduce(mine, "sum", None)
        assert total.tolist() == [3.0] and mine.item() == dist.get_rank() + 1
        ```
    """
    pg = group_of(group, "all_reduce")
    tensor, op = maps.summed(tensor, reduceOp)
    return maps.apply(maps.AllReduce(pg, op), tensor)[0]


def broadcast(tensor: torch.Tensor, src: int, group: Group = None, tag: str = "") -> torch.Tensor:
    """Return the `tensor` of group rank `src`; its gradient is the sum of all ranks', on `src`.

    Returns:
        A new tensor.

    Shapes:
        tensor [*] on all ranks, of which only that of `src` is read; result [*].

    Example:
        ```python
        mine = torch.tensor([dist.get_rank() + 1.0])
        assert funcol.broadcast(mine, 1, None).tolist() == [2.0]
        ```
    """
    pg = group_of(group, "broadcast")
    return maps.apply(maps.Broadcast(pg, pg.peer(None, src, "broadcast", "src")), tensor)[0]


def all_gather_tensor(
    tensor: torch.Tensor, gather_dim: int, group: Group = None, tag: str = ""
) -> torch.Tensor:
    """Return all ranks' tensors joined along `gather_dim`, in the order of ranks.

    Returns:
        A new tensor.

    Shapes:
        tensor [*, k, *], the same on all ranks; result [*, n*k, *]. A scalar counts as [1].

    Example:
        ```python
        mine = torch.tensor([dist.get_rank()])
        assert funcol.all_gather_tensor(mine, 0, None).tolist() == [0, 1]
        ```
    """
    pg = group_of(group, "all_gather_tensor")
    tensor = tensor if tensor.dim() else tensor.reshape(1)
    dim = _dim(tensor, gather_dim, "all_gather_tensor")
    return maps.apply(maps.AllGather(pg, dim), tensor)[0]


def reduce_scatter_tensor(
    tensor: torch.Tensor, reduceOp: object, scatter_dim: int, group: Group = None, tag: str = ""
) -> torch.Tensor:
    """Return this rank's part, along `scatter_dim`, of the reduction of all ranks' `tensor`.

    Args:
        reduceOp: As in `all_reduce`.

    Returns:
        A new tensor.

    Shapes:
        tensor [*, n*k, *], the same on all ranks; result [*, k, *].

    Example:
        ```python
        part = funcol.reduce_scatter_tensor(torch.tensor([1.0, 2.0]), "sum", 0, None)
        assert part.tolist() == [2.0 * (dist.get_rank() + 1)]  # on 2 ranks
        ```
    """
    pg = group_of(group, "reduce_scatter_tensor")
    dim = _dim(tensor, scatter_dim, "reduce_scatter_tensor")
    tensor, op = maps.summed(tensor, reduceOp)
    return maps.apply(maps.ReduceScatter(pg, op, dim), tensor)[0]


def all_to_all_single(
    tensor: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: Group = None,
    tag: str = "",
) -> torch.Tensor:
    """Send part j of `tensor` to rank j; return the received parts, in the order of ranks.

    Args:
        output_split_sizes: Rows expected from each rank; equal parts if None.
        input_split_sizes: Rows for each rank; equal parts if None.

    Returns:
        A new tensor.

    Shapes:
        tensor [sum(input_split_sizes), *]; result [sum(output_split_sizes), *].

    Example:
        ```python
        rank = dist.get_rank()
        mine = torch.tensor([10 * rank, 10 * rank + 1])  # row j is for rank j
        assert funcol.all_to_all_single(mine, None, None, None).tolist() == [rank, 10 + rank]
        ```
    """
    op = "all_to_all_single"
    pg = group_of(group, op)
    if (output_split_sizes is None) != (input_split_sizes is None):
        raise UsageError("pass both split sizes, or neither", op=op, group=pg.group_name)
    takes = tuple(as_splits(output_split_sizes, op, "output"))
    gives = tuple(as_splits(input_split_sizes, op, "input"))
    return maps.apply(maps.AllToAll(pg, takes, gives), tensor)[0]


def permute_tensor(
    tensor: torch.Tensor, src_dst: Sequence[int], group: Group = None, tag: str = ""
) -> torch.Tensor:
    """Send `tensor` to rank ``src_dst[r]``, r being this rank; return the received tensor.

    Args:
        src_dst: For each rank of the group the rank that it sends to, each at most once; -1 for
            none.

    Returns:
        A new tensor.

    Shapes:
        tensor [k, *] on all ranks; result [k, *], or [0, *] if no rank sends here. A scalar counts
        as [1].

    Example:
        ```python
        swapped = funcol.permute_tensor(torch.tensor([rank]), [1, 0], None)  # 0 to 1, and 1 to 0
        assert swapped.tolist() == [1 - rank]
        ```
    """
    op = "permute_tensor"
    pg = group_of(group, op)
    n, rank = pg.size(), pg.rank()
    targets = [dst for dst in src_dst if dst != -1]
    if len(src_dst) != n or len(set(targets)) != len(targets) or set(targets) - set(range(n)):
        raise UsageError(
            "src_dst must name one rank for each rank of the group, and none twice",
            op=op,
            group=pg.group_name,
            seen=f"{list(src_dst)} for {n} ranks",
        )
    tensor = tensor if tensor.dim() else tensor.reshape(1)
    rows = tensor.shape[0]
    gives = tuple(rows if dst == src_dst[rank] else 0 for dst in range(n))
    takes = tuple(rows if dst == rank else 0 for dst in src_dst)
    if not any(gives):
        tensor = tensor[:0]
    return maps.apply(maps.AllToAll(pg, takes, gives), tensor)[0]


# torch 2.13 has both names of each, and the forms with `_autograd` from when the others had none.
all_gather_single = all_gather_single_autograd = all_gather_tensor_autograd = all_gather_tensor
reduce_scatter_single = reduce_scatter_single_autograd = reduce_scatter_tensor
reduce_scatter_tensor_autograd = reduce_scatter_tensor
all_to_all_single_autograd = all_to_all_single


def all_reduce_coalesced(
    self: Sequence[torch.Tensor], reduceOp: object, group: Group = None, tag: str = ""
) -> list[torch.Tensor]:
    """Return the reductions of several tensors; see `all_reduce`.

    Args:
        self: The tensors.
        reduceOp: As in `all_reduce`.

    Returns:
        New tensors, in the same order.

    Example:
        ```python
        sums = funcol.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", None)
        assert [s.tolist() for s in sums] == [[2.0, 2.0], [2.0, 2.0, 2.0]]
        ```
    """
    return [all_reduce(tensor, reduceOp, group, tag) for tensor in self]


def all_gather_single_coalesced(
    self: Sequence[torch.Tensor], group: Group = None, tag: str = ""
) -> list[torch.Tensor]:
    """Return all ranks' tensors joined along dim 0, for several tensors.

    Args:
        self: The tensors.

    Returns:
        New tensors, in the same order.

    Example:
        ```python
        mine = torch.tensor([rank])
        first, second = funcol.all_gather_single_coalesced([mine, mine + 10], None)
        assert first.tolist() == [0, 1] and second.tolist() == [10, 11]
        ```
    """
    return [all_gather_tensor(tensor, 0, group, tag) for tensor in self]


def reduce_scatter_single_coalesced(
    inputs: Sequence[torch.Tensor],
    reduceOp: object,
    scatter_dim: Sequence[int],
    group: Group = None,
    tag: str = "",
) -> list[torch.Tensor]:
    """Return this rank's parts of the reductions of several tensors; see `reduce_scatter_tensor`.

    Args:
        scatter_dim: One dim for each tensor.

    Returns:
        New tensors, in the same order.

    Example:
        ```python
        inputs = [torch.ones(2), torch.ones(4)]
        parts = funcol.reduce_scatter_single_coalesced(inputs, "sum", [0, 0], None)
        assert [p.tolist() for p in parts] == [[2.0], [2.0, 2.0]]
        ```
    """
    pairs = zip(inputs, scatter_dim, strict=True)
    return [reduce_scatter_tensor(tensor, reduceOp, dim, group, tag) for tensor, dim in pairs]


all_gather_into_tensor_coalesced = all_gather_single_coalesced
reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
