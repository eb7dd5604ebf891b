"""Tensors of one call that share memory.

A collective reads all of its inputs before it writes an output, and writes each element once. For
contiguous tensors that the program passes:

* An input that overlaps an output is copied before the call (`checks.plain_call`), unless the two
  are the same memory as with MPI_IN_PLACE (`in_place`).
* Outputs that overlap are refused before anything is sent: their result is undefined.

Strided outputs are written through contiguous copies. So an input of the same call may overlap
them. If two of them share elements, the values of these are undefined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.comm.call import Call
from dure.comm.capture import has_no_values
from dure.errors import ShapeError

Tensors = Sequence[torch.Tensor]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of addresses of a contiguous tensor."""
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def ranges_overlap(writes: Tensors, reads: Tensors = ()) -> bool:
    """Return whether a written tensor overlaps another one; all are contiguous."""
    spans = [(*_span(t), True) for t in writes]
    spans += [(*_span(t), False) for t in reads]
    spans.sort()
    written = read = 0  # where the ranges so far end
    for start, end, writes_it in spans:
        if end <= start:
            continue
        if start < written or (writes_it and start < read):
            return True
        if writes_it:
            written = max(written, end)
        else:
            read = max(read, end)
    return False


def check_apart(writes: Tensors, reads: Tensors, op: str) -> None:
    """Raise if a contiguous tensor that is written overlaps another one.

    Raises:
        ShapeError: Nothing was sent.
    """
    if has_no_values([*writes, *reads][:1]):  # then none of the call's tensors has
        return
    writes, reads = ([t for t in side if t.is_contiguous()] for side in (writes, reads))
    if ranges_overlap(writes, reads):
        raise ShapeError(
            "a tensor that the call writes shares memory with another tensor of the call",
            op=op,
            fix="Pass tensors with memory of their own, such as .clone().",
        )


def in_place(call: Call, inputs: Tensors, outputs: Tensors, rank: int, size: int) -> bool:
    """Return whether the inputs and outputs of a call are the same memory, as MPI_IN_PLACE has it.

    Args:
        call: Says what the operation is.
        inputs: Contiguous.
        outputs: Contiguous.
        rank: This rank.
        size: How many ranks there are.
    """
    if inputs[0].dtype is not outputs[0].dtype:
        return False
    kind, give, take = call.kind, _span(inputs[0]), _span(outputs[0])
    if kind == "all_to_all":
        return call.single and give == take  # backends differ in what they do with lists
    if kind in ("all_gather", "gather"):
        if not call.single:
            take = _span(outputs[rank])
        elif (length := (take[1] - take[0]) // size) == give[1] - give[0]:
            take = (take[0] + rank * length, take[0] + (rank + 1) * length)
        return give == take
    if not call.single:
        give = _span(inputs[rank])
    elif (length := (give[1] - give[0]) // size) == take[1] - take[0]:
        give = (give[0] + rank * length, give[0] + (rank + 1) * length)
    return give == take


def separated(
    call: Call, inputs: list[torch.Tensor], outputs: Tensors, rank: int, size: int
) -> list[torch.Tensor]:
    """Return the inputs of a call, those that overlap an output in part as copies.

    Args:
        call: Says what the operation is.
        inputs: Contiguous.
        outputs: Contiguous, in memory of the program or of the call.
        rank: This rank.
        size: How many ranks there are.

    Raises:
        ShapeError: Two outputs overlap.
    """
    if not inputs or not outputs or not ranges_overlap(outputs, inputs):
        return inputs
    check_apart(outputs, (), call.op)
    shared = [i for i, t in enumerate(inputs) if ranges_overlap(outputs, (t,))]
    if shared and in_place(call, inputs, outputs, rank, size):
        if call.kind == "all_to_all":
            return inputs
        own = rank if len(inputs) == size and not call.single else 0
        shared = [i for i in shared if i != own]
    return [t.clone() if i in shared else t for i, t in enumerate(inputs)]
