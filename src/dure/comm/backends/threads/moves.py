"""The collectives of the threads backend, which one thread runs for all ranks.

The threads backend collects one `Call` of each rank and compares their fingerprints before data are
written; then `move` runs the collective. Because all inputs are available, a collective is a gather
of bytes (or one reduction in rank order) and a copy to each output; no rank sees another's partly
written tensor, so in-place calls are safe.

Costs count tensor operations for n ranks: the `_single` forms take O(n), so that 128 thread-ranks
stay cheap; forms with lists take O(n^2), one for each list element.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from dure.comm.call import Call
from dure.comm.reduction import as_bytes, joined, reduce_in_order

__all__ = ["move"]


def move(calls: Sequence[Call]) -> None:
    """Run the collective; `calls` are those of all ranks, in rank order, and match."""
    with torch.inference_mode():  # outputs may be inference tensors; nothing is recorded
        _MOVES[calls[0].kind](calls)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements, of any shapes, unless both tensors are the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.detach().view(-1).copy_(source.detach().view(-1))


def _cut(source: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cut the bytes `source` into parts as long as the tensors `like`."""
    ends = list(itertools.accumulate(t.numel() * t.element_size() for t in like))
    return [source[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _deal(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Cut the bytes `source` and copy each part to its target."""
    for target, part in zip(targets, _cut(source, targets), strict=True):
        as_bytes(target).copy_(part)


def _all_reduce(calls: Sequence[Call]) -> None:
    result = torch.empty_like(calls[0].outputs[0])
    _reduce_inputs(calls, result)
    for call in calls:
        _copy(call.outputs[0], result)


def _reduce_inputs(calls: Sequence[Call], out: torch.Tensor) -> None:
    op = calls[0].needed_reduction
    reduce_in_order([c.inputs[0] for c in calls], op, out)


def _reduce(calls: Sequence[Call]) -> None:
    _reduce_inputs(calls, calls[calls[0].root].outputs[0])


def _broadcast(calls: Sequence[Call]) -> None:
    source = calls[calls[0].root].inputs[0]
    for call in calls:
        _copy(call.outputs[0], source)


def _all_gather(calls: Sequence[Call]) -> None:
    gathered = joined([c.inputs[0] for c in calls])
    for call in calls:
        _deal(gathered, call.outputs)


def _reduce_scatter(calls: Sequence[Call]) -> None:
    """Reduce complete inputs (lists are joined first), then copy the parts."""
    op = calls[0].needed_reduction
    dtype = calls[0].inputs[0].dtype
    inputs = [c.inputs[0] if len(c.inputs) == 1 else joined(c.inputs).view(dtype) for c in calls]
    result = torch.empty_like(inputs[0])
    reduce_in_order(inputs, op, result)
    _deal(as_bytes(result), [c.outputs[0] for c in calls])


def _all_to_all(calls: Sequence[Call]) -> None:
    n = len(calls)
    if all(call.single for call in calls):
        shape = (n, -1 if calls[0].inputs[0].numel() else 0)
        rows = torch.stack([as_bytes(c.inputs[0]).view(shape) for c in calls])
        for r, call in enumerate(calls):
            as_bytes(call.outputs[0]).view(shape).copy_(rows[:, r])
        return
    gives = [call.gives(n) for call in calls]
    sent = [_cut(joined(parts), parts) for parts in gives]
    for r, call in enumerate(calls):
        for target, parts in zip(call.takes(n), sent, strict=True):
            if target.numel():
                as_bytes(target).copy_(parts[r])


def _host_shared_empty(calls: Sequence[Call]) -> None:
    """Give the tensors of all ranks the memory of the first rank's."""
    memory = calls[0].outputs[0].untyped_storage()
    for call in calls[1:]:
        call.outputs[0].set_(memory)  # pyright: ignore[reportUnknownMemberType]


def _barrier(calls: Sequence[Call]) -> None:
    """Do nothing: all ranks have called."""


_MOVES: dict[str, Callable[[Sequence[Call]], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _all_to_all,
    "scatter": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "new_group": _barrier,
    "host_shared_empty": _host_shared_empty,
}
