"""all_reduce of sparse (COO) tensors.

Ranks hold different numbers of entries. They first tell each other how many (a small all_gather,
waited for even with ``async_op=True``), then gather everyone's indices and values with uneven
lengths; each rank adds them up by itself. Entries are added in the order of ranks, so that all
ranks get the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dure.comm.group.core import started
from dure.comm.ops import ReduceOp
from dure.comm.work import Work, combine
from dure.errors import DeviceError

if TYPE_CHECKING:
    from dure.comm.group.operations import ProcessGroup


def sparse_all_reduce(
    group: ProcessGroup, tensor: torch.Tensor, op: ReduceOp, async_op: bool
) -> Work | None:
    """Sum the sparse `tensor` of all ranks, in place, on all ranks.

    Shapes:
        tensor: any COO tensor, of the same shape and dtype on all ranks.

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
    count = torch.tensor([mine._nnz()], device=device)
    counts = torch.empty(n, dtype=torch.int64, device=device)
    group.all_gather_single(counts, count)
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
            torch.cat(indices, 1), torch.cat(values), mine.shape, check_invariants=False
        )
        with torch.no_grad():  # detach() would not do: a sparse tensor's entries are replaced
            tensor.copy_(total.coalesce())

    return combine(both, [tensor], async_op, finish=add_up)
