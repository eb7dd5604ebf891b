"""What each collective does to the tensors, once the calls of all ranks are in one hand.

The threads backend collects one `Call` of each rank; `check_calls` compares them before any data
is touched, then `move` does the whole collective at once. Because every input is at hand, a
collective is a gather of bytes (or one reduction in rank order) and a copy to each output; no rank
ever sees another's half-written tensor, so in-place use needs no care by the callers.

Costs count tensor operations for n ranks: the `_single` forms take O(n), so that 128 thread-ranks
stay cheap; forms with lists take O(n^2), one for each list element.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dure.comm.ops import ReduceOp
from dure.comm.reduction import as_bytes, reduce_in_order

__all__ = ["Call", "check_calls", "in_one_form", "move"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What one rank called.

    Attributes:
        op: The method of `Backend`, such as "all_reduce".
        inputs: What this rank gives: one tensor, or one for each rank.
        outputs: Where its results go: one tensor, or one for each rank.
        root: `src` or `dst`; -1 where there is none.
        reduce: The reduction, if it is one.
        site: File and line of the caller.
    """

    op: str
    inputs: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()
    root: int = -1
    reduce: ReduceOp | None = None
    site: str = ""

    def __str__(self) -> str:
        """Describe the call as `Desync.calls` shows it."""
        parts: list[str] = []
        if self.inputs:
            parts.append(_describe(self.inputs))
        if self.outputs and self.outputs is not self.inputs:
            parts.append("-> " + _describe(self.outputs))
        if self.root >= 0:
            parts.append(f"root={self.root}")
        if self.reduce is not None:
            parts.append(self.reduce.name)
        at = f" at {self.site}" if self.site else ""
        return f"{self.op}({', '.join(parts)}){at}"


def _describe(tensors: Sequence[torch.Tensor]) -> str:
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if len(tensors) == 1:
        return f"{dtype}{list(tensors[0].shape)}"
    return f"{dtype} of lengths {[t.numel() for t in tensors]}"


def in_one_form(calls: list[Call]) -> list[Call]:
    """Let ranks that give split sizes to all_to_all_single meet ranks that give none."""
    if {call.op for call in calls} != {"all_to_all", "all_to_all_single"}:
        return calls
    n = len(calls)
    return [
        call
        if call.op == "all_to_all"
        else replace(
            call,
            op="all_to_all",
            inputs=call.inputs[0].view(-1).tensor_split(n),
            outputs=call.outputs[0].view(-1).tensor_split(n),
        )
        for call in calls
    ]


def check_calls(calls: Sequence[Call]) -> str:
    """Compare what all ranks called; return what differs, or "" where all fits together."""
    first = calls[0]
    for r, call in enumerate(calls):
        for what, mine, theirs in (
            ("operation", first.op, call.op),
            ("root", first.root, call.root),
            ("reduction", _code(first), _code(call)),
            ("dtype", _dtype(calls[0]), _dtype(call)),
        ):
            if mine != theirs and None not in (mine, theirs):
                return f"rank 0 and rank {r} differ in the {what}"
    return _check_lengths(calls)


def _code(call: Call) -> int | None:
    return None if call.reduce is None else call.reduce.code


def _dtype(call: Call) -> torch.dtype | None:
    tensors = call.inputs or call.outputs
    return tensors[0].dtype if tensors else None


def _numels(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [t.numel() for t in tensors]


def _check_lengths(calls: Sequence[Call]) -> str:
    """Tell which lengths do not fit; each operation has its own idea of what must."""
    op = calls[0].op
    if op in ("all_gather", "gather"):
        sent = [c.inputs[0].numel() for c in calls]
        wrong = [r for r, c in enumerate(calls) if c.outputs and _numels(c.outputs) != sent]
    elif op == "scatter":
        sent = _numels(calls[calls[0].root].inputs)
        wrong = [r for r, c in enumerate(calls) if c.outputs[0].numel() != sent[r]]
    elif op == "all_to_all":
        sent_rows = [_numels(c.inputs) for c in calls]
        wrong = [
            r for r, c in enumerate(calls) if _numels(c.outputs) != [row[r] for row in sent_rows]
        ]
    else:
        expected = _numels(calls[0].inputs)
        wrong = [r for r, c in enumerate(calls) if _numels(c.inputs) != expected]
    return f"the lengths of rank {wrong[0]} do not fit the others'" if wrong else ""


def move(calls: Sequence[Call]) -> None:
    """Do the collective; `calls` are those of all ranks, in rank order, and fit together."""
    with torch.inference_mode():  # outputs may be inference tensors; nothing is recorded
        _MOVES[calls[0].op](calls)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements, whatever the shapes, where the two are not the same memory already."""
    if target.data_ptr() != source.data_ptr():
        target.detach().view(-1).copy_(source.detach().view(-1))


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of `tensors`, one after another, as a new tensor."""
    return torch.cat([as_bytes(t) for t in tensors])


def _cut(source: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cut the bytes `source` into parts as long as the tensors `like`."""
    ends = list(itertools.accumulate(t.numel() * t.element_size() for t in like))
    return [source[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _deal(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Cut the bytes `source` and hand each of `targets` its part."""
    for target, part in zip(targets, _cut(source, targets), strict=True):
        as_bytes(target).copy_(part)


def _all_reduce(calls: Sequence[Call]) -> None:
    result = torch.empty_like(calls[0].outputs[0])
    _reduce_inputs(calls, result)
    for call in calls:
        _copy(call.outputs[0], result)


def _reduce_inputs(calls: Sequence[Call], out: torch.Tensor) -> None:
    op = calls[0].reduce
    assert op is not None
    reduce_in_order([c.inputs[0] for c in calls], op, out)


def _reduce(calls: Sequence[Call]) -> None:
    _reduce_inputs(calls, calls[calls[0].root].outputs[0])


def _broadcast(calls: Sequence[Call]) -> None:
    source = calls[calls[0].root].inputs[0]
    for call in calls:
        _copy(call.outputs[0], source)


def _all_gather(calls: Sequence[Call]) -> None:
    gathered = _joined([c.inputs[0] for c in calls])
    for call in calls:
        _deal(gathered, call.outputs)


def _gather(calls: Sequence[Call]) -> None:
    for target, call in zip(calls[calls[0].root].outputs, calls, strict=True):
        _copy(target, call.inputs[0])


def _scatter(calls: Sequence[Call]) -> None:
    sources = calls[calls[0].root].inputs
    dealt = _joined(sources)  # the root's output may be one of its inputs
    _deal(dealt, [c.outputs[0] for c in calls])


def _reduce_scatter(calls: Sequence[Call]) -> None:
    """Reduce whole inputs (lists joined first), then deal the parts."""
    op = calls[0].reduce
    assert op is not None
    dtype = calls[0].inputs[0].dtype
    whole = [c.inputs[0] if len(c.inputs) == 1 else _joined(c.inputs).view(dtype) for c in calls]
    result = torch.empty_like(whole[0])
    reduce_in_order(whole, op, result)
    _deal(as_bytes(result), [c.outputs[0] for c in calls])


def _all_to_all(calls: Sequence[Call]) -> None:
    sent = [_cut(_joined(c.inputs), c.inputs) for c in calls]
    for r, call in enumerate(calls):
        for target, parts in zip(call.outputs, sent, strict=True):
            as_bytes(target).copy_(parts[r])


def _all_to_all_single(calls: Sequence[Call]) -> None:
    shape = (len(calls), -1 if calls[0].inputs[0].numel() else 0)
    sent = torch.stack([as_bytes(c.inputs[0]).view(shape) for c in calls])
    for r, call in enumerate(calls):
        as_bytes(call.outputs[0]).view(shape).copy_(sent[:, r])


def _host_shared_empty(calls: Sequence[Call]) -> None:
    """Let the tensors of all ranks have the memory of the first's."""
    memory = calls[0].outputs[0].untyped_storage()
    for call in calls[1:]:
        call.outputs[0].set_(memory)  # pyright: ignore[reportUnknownMemberType]


def _barrier(calls: Sequence[Call]) -> None:
    """All ranks have called: that is all there is to it."""


_MOVES: dict[str, Callable[[Sequence[Call]], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
    "host_shared_empty": _host_shared_empty,
}
