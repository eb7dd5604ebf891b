"""The operations of the drill: how each is called, and what of it can be wrong on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import dure

SMALL, LARGE = 6, 300_000


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a rank calls an operation with."""

    rank: int
    size: int
    count: int
    dtype: torch.dtype = torch.float32
    root: int = 0
    reduction: Any = dure.ReduceOp.SUM

    def tensor(self, times: int = 1) -> torch.Tensor:
        return torch.full((times * self.count,), self.rank + 1, dtype=self.dtype)

    def tensors(self) -> list[torch.Tensor]:
        return [self.tensor() for _ in range(self.size)]


Tensors = list[torch.Tensor]
Run = Callable[[bool], Any]
Call = tuple[Tensors, Run]
"""The tensors that may change, and the call; its argument is `async_op`."""


def _all_reduce(a: Arguments) -> Call:
    x = a.tensor()
    return [x], lambda later: dure.all_reduce(x, a.reduction, async_op=later)


def _reduce(a: Arguments) -> Call:
    x = a.tensor()
    return [x], lambda later: dure.reduce(x, a.root, a.reduction, async_op=later)


def _broadcast(a: Arguments) -> Call:
    x = a.tensor()
    return [x], lambda later: dure.broadcast(x, a.root, async_op=later)


def _all_gather(a: Arguments) -> Call:
    out = a.tensors()
    return out, lambda later: dure.all_gather(out, a.tensor(), async_op=later)


def _all_gather_single(a: Arguments) -> Call:
    out = a.tensor(a.size)
    return [out], lambda later: dure.all_gather_single(out, a.tensor(), async_op=later)


def _gather(a: Arguments) -> Call:
    out = a.tensors() if a.rank == a.root else None
    return out or [], lambda later: dure.gather(a.tensor(), out, a.root, async_op=later)


def _scatter(a: Arguments) -> Call:
    x, parts = a.tensor(), a.tensors() if a.rank == a.root else None
    return [x], lambda later: dure.scatter(x, parts, a.root, async_op=later)


def _reduce_scatter(a: Arguments) -> Call:
    x, parts = a.tensor(), a.tensors()
    return [x], lambda later: dure.reduce_scatter(x, parts, a.reduction, async_op=later)


def _reduce_scatter_single(a: Arguments) -> Call:
    x, whole = a.tensor(), a.tensor(a.size)
    return [x], lambda later: dure.reduce_scatter_single(x, whole, a.reduction, async_op=later)


def _all_to_all(a: Arguments) -> Call:
    out, parts = a.tensors(), a.tensors()
    return out, lambda later: dure.all_to_all(out, parts, async_op=later)


def _all_to_all_single(a: Arguments) -> Call:
    out, whole = a.tensor(a.size), a.tensor(a.size)
    return [out], lambda later: dure.all_to_all_single(out, whole, async_op=later)


def _barrier(a: Arguments) -> Call:
    return [], lambda later: dure.barrier(async_op=later)


def _nothing(later: bool) -> None:
    """What a rank does that has no part in a message."""


def _message(a: Arguments, sender: int, receiver: int) -> Call:
    x = a.tensor()
    if a.rank == sender:
        return [x], lambda later: (dure.isend if later else dure.send)(x, receiver)
    if a.rank == receiver:
        return [x], lambda later: dure.irecv(x, sender) if later else _received(x, sender)
    return [x], _nothing


def _received(x: torch.Tensor, sender: int) -> None:
    dure.recv(x, sender)


def _send(a: Arguments) -> Call:
    return _message(a, 0, 1)


def _recv(a: Arguments) -> Call:
    return _message(a, 1, 0)


def _broadcast_objects(a: Arguments) -> Call:
    return [], lambda later: dure.broadcast_object_list([{"rank": a.rank}], a.root)


def _all_gather_object(a: Arguments) -> Call:
    return [], lambda later: dure.all_gather_object([None] * a.size, {"rank": a.rank})


COLLECTIVES: dict[str, Callable[[Arguments], Call]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
}
MESSAGES = {"send": _send, "recv": _recv}
OBJECTS = {"broadcast_object_list": _broadcast_objects, "all_gather_object": _all_gather_object}
ALL = COLLECTIVES | MESSAGES | OBJECTS

ROOTED = {"reduce", "broadcast", "gather", "scatter"}
REDUCING = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"}

WRONG: dict[str, Callable[[Arguments], Arguments]] = {
    "dtype": lambda a: replace(a, dtype=torch.int32),
    "count": lambda a: replace(a, count=a.count + 1),
    "root": lambda a: replace(a, root=1),
    "reduction": lambda a: replace(a, reduction=dure.ReduceOp.MAX),
}
"""One argument that is another on one rank."""


def another(op: str) -> str:
    """Name a collective that is not `op`."""
    return "all_reduce" if op == "barrier" else "barrier"
