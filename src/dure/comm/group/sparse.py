"""all_reduce of sparse (COO) tensors.

Ranks have different numbers of entries. They first exchange a header (a small all_gather, waited
for even with ``async_op=True``): the number of entries, and a digest of the *layout*, that is the
dtype, the shape and the number of sparse dimensions. If layouts differ, every rank raises `Desync`:
an index of one rank may be outside the tensor of another. Otherwise the ranks gather all indices
and values with uneven lengths, and each rank adds them up in the order of ranks, so that all ranks
get the same bits.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from dure.comm.group.core import started
from dure.comm.ops import ReduceOp
from dure.comm.work import Work, combine
from dure.errors import Desync, DeviceError

if TYPE_CHECKING:
    from dure.comm.group.operations import ProcessGroup


def sparse_all_reduce(
    group: ProcessGroup, tensor: torch.Tensor, op: ReduceOp, async_op: bool
) -> Work | None:
    """Sum the sparse `tensor` of all ranks, in place, on all ranks.

    Shapes:
        tensor: any COO tensor, of the same shape, dtype and number of sparse dimensions on all
            ranks.

    Raises:
        Desync: The ranks' tensors differ in one of these; on all ranks, before an entry is sent.

    Cost:
        Two steps; each rank sends its entries to all others.
    """
    if tensor.layout is not torch.sparse_coo or op != ReduceOp.SUM:
        raise DeviceError(
            "all_reduce takes sparse tensors in the COO layout, and SUM",
            op="all_reduce",
            seen=f"{tensor.layout}, {op}",
            fix="Use .to_sparse_coo(), or .to_dense().",
        )
    group.refuse_coalescing(
        "all_reduce",
        "sparse tensors cannot be reduced within a coalescing manager",
        "their numbers of entries must be known before the entries are sent",
    )
    mine = tensor.detach().coalesce()
    n, device = group.size(), tensor.device
    layout = f"{mine.dtype}, shape {list(mine.shape)}, {mine.sparse_dim()} sparse dimensions"
    digest = hashlib.blake2b(layout.encode(), digest_size=8).digest()
    header = torch.tensor([[mine._nnz(), int.from_bytes(digest, signed=True)]], device=device)
    headers = header.new_empty((n, 2))
    group.all_gather_single(headers, header)
    counts, digests = headers.unbind(1)
    others: list[int] = (digests != digests[0]).nonzero().flatten().tolist()
    if others:
        raise _layouts_differ(group, layout, others[0])
    rows = mine.sparse_dim()
    lengths: list[int] = counts.tolist()
    indices = [torch.empty((rows, k), dtype=torch.int64, device=device) for k in lengths]
    tail = mine.values().shape[1:]
    values = [torch.empty((k, *tail), dtype=mine.dtype, device=device) for k in lengths]
    both = [
        started(group.all_gather(indices, mine.indices().contiguous(), async_op=True)),
        started(group.all_gather(values, mine.values().contiguous(), async_op=True)),
    ]

    def add_up() -> None:
        total = torch.sparse_coo_tensor(
            torch.cat(indices, 1),
            torch.cat(values),
            mine.shape,
            device=mine.device,
            check_invariants=False,
        )
        with torch.no_grad():  # detach() would not do: a sparse tensor's entries are replaced
            tensor.copy_(total.coalesce())

    return combine(both, [tensor], async_op, finish=add_up)


def _layouts_differ(group: ProcessGroup, layout: str, other: int) -> Desync:
    """Make this rank's error for layouts that differ; the layout of `other` is not rank 0's."""
    return Desync(
        "the ranks' sparse tensors differ in shape, dtype or number of sparse dimensions",
        op="all_reduce",
        group=group.group_name,
        rank=group.rank(),
        world_size=group.size(),
        calls={group.rank(): f"all_reduce({layout})"},
        seen=f"rank {other} differs from rank 0; this rank has {layout}",
        fix="Give all ranks tensors of one shape and dtype, with as many sparse dimensions.",
    )
