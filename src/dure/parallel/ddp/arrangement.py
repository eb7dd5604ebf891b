"""Who lies where: the slots of all parameters, and the buckets that they are in for now.

An arrangement begins with the order that is expected, the reverse of registration, and is made anew
once, when the order in which gradients become ready is known; see "Rebuilding" in reducer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dure.parallel.ddp.bucketing import plan_buckets
from dure.parallel.ddp.buckets import Bucket, Regions, size_of
from dure.parallel.ddp.casting import CastSlot
from dure.parallel.ddp.ledger import Ledger
from dure.parallel.ddp.slots import NamedParameter, Slot, SparseSlot

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Arrangement", "ReducerOptions"]

_ROOT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerOptions:
    """How a reducer buckets, and what it expects.

    Attributes:
        caps: A bucket is closed when it holds at least this many bytes: the first, the second, ...;
            the last number holds for all further ones.
        allow_unused: A parameter without a gradient is no error.
        static_graph: Every backward is like the first one.
        leave_out_unused: Parameters that nobody used in the first backward are never used.
        reduce_dtype: In which real gradients are reduced; their own by default.
    """

    caps: tuple[int, ...]
    allow_unused: bool = False
    static_graph: bool = False
    leave_out_unused: bool = False
    reduce_dtype: torch.dtype | None = None


class Arrangement:
    """Slots, buckets and ledger of one module on one group.

    Collective: construction, where buckets are memory that ranks share.

    Attributes:
        slots: Of all parameters, in the order of registration.
        buckets: In the order in which they are reduced.
        ledger: The end of the last one.
    """

    def __init__(
        self, group: ProcessGroup, parameters: Sequence[NamedParameter], options: ReducerOptions
    ) -> None:
        self._options, self._num_ranks = options, group.size()
        self.slots = [self._make_slot(number, p) for number, p in enumerate(parameters)]

        def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            if device.type == "cpu":
                return group.shared_empty(numel, dtype=dtype)
            return torch.zeros(numel, dtype=dtype, device=device)

        self._regions = Regions(self.slots, Ledger.size(len(parameters)), empty)
        self._new_plan: list[list[Slot]] | None = None
        self._cut(self._plan(range(len(parameters) - 1, -1, -1)))

    def bucket_sizes(self) -> list[int]:
        """Return the bytes of gradients in each bucket."""
        return [sum(slot.size for slot in b.slots) for b in self.buckets if b.slots]

    def parameter_kinds(self) -> list[tuple[int, torch.dtype]]:
        """Return, for each parameter, the bytes and the dtype of its gradient."""
        return [(slot.size, slot.parameter.dtype) for slot in self.slots]

    def _make_slot(self, number: int, named: NamedParameter) -> Slot:
        own, wanted = named.parameter.dtype, self._options.reduce_dtype
        if named.sparse:
            return SparseSlot(number, named, own)
        if wanted is None or not own.is_floating_point or wanted == own:
            return Slot(number, named, own)
        return CastSlot(number, named, wanted)

    def _plan(self, order: Sequence[int]) -> list[list[Slot]]:
        """Divide slots into buckets; `order` has the numbers of those that take part."""
        taking_part = [self.slots[number] for number in order]
        plan = plan_buckets(
            [size_of(slot) for slot in taking_part],
            caps=self._options.caps,
            order=range(len(taking_part)),
        )
        return [[taking_part[i] for i in members] for members in plan]

    def _cut(self, plan: Sequence[Sequence[Slot]]) -> None:
        self.buckets: list[Bucket] = self._regions.lay_out(plan)
        self.ledger = Ledger(self.buckets[-1].flat, len(self.slots), self._num_ranks)

    def learn(
        self, group: ProcessGroup, ready_order: Sequence[int], used: Sequence[bool] | None
    ) -> None:
        """Plan buckets by rank 0's order.

        Collective: all ranks of the group.
        Cost: one broadcast of 8 bytes a parameter; nothing where there is one bucket.

        Args:
            group: The ranks.
            ready_order: Numbers of parameters as their gradients came on this rank.
            used: Whether any rank uses each parameter; the others are left out. None: all stay.
        """
        seen = dict.fromkeys(ready_order)
        present = [slot.number for bucket in self.buckets for slot in bucket.slots]
        numbers = [*seen, *(number for number in present if number not in seen)]
        if len(self.buckets) > 1:
            order = torch.tensor(numbers, device=self.ledger.flags.device)
            group.broadcast(order, _ROOT)
            numbers = order.tolist()
        else:  # one order of buckets, whatever is in them
            numbers = present
        if used is not None:
            numbers = [number for number in numbers if used[number]]
        self._new_plan = self._plan(numbers)

    def rebuild(self) -> bool:
        """Follow the plan that was learned, if there is one; tell whether there was."""
        if self._new_plan is None:
            return False
        if self._new_plan != [bucket.slots for bucket in self.buckets if bucket.slots]:
            self._cut(self._new_plan)
        self._new_plan = None
        return True
