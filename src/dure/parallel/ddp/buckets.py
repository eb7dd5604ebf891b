"""Buckets: gradients that one collective reduces, in memory that the ranks share.

All dense gradients of one dtype and device lie in one block of memory, their *region*. A
bucket is a stretch of it; so buckets can be cut anew, once it is known in which order gradients
become ready, without a byte of further memory, and without asking the other ranks for it.

    region   |  bucket 0  |   bucket 1   |     bucket 2    ...     | unused |
    bucket   | gradient | gradient | ... | gradient |
    the last | gradient | ... | gradient | ledger |

Each bucket begins at an address that the fastest instructions like; gradients within it lie without
padding. The last bucket also carries the ledger (ledger.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from dure.parallel.ddp.bucketing import GradientSize
from dure.parallel.ddp.slots import Slot, SparseSlot

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.comm.work import Work

__all__ = ["Bucket", "GradBucket", "Regions", "kind_of", "size_of"]

_ALIGNMENT_BYTES = 64

Kind = Hashable


def kind_of(slot: Slot) -> Kind:
    """Tell what must be equal for two gradients to share a bucket."""
    if isinstance(slot, SparseSlot):
        return ("sparse", slot.number)
    return (slot.dtype, slot.parameter.dtype, slot.parameter.device)


def size_of(slot: Slot) -> GradientSize:
    """Tell the planner what it needs to know; a sparse gradient fills a bucket of its own."""
    sparse = isinstance(slot, SparseSlot)
    return GradientSize(num_bytes=1 << 62 if sparse else slot.size, kind=kind_of(slot))


class Bucket:
    """Gradients that are reduced together; see the module's text for the layout.

    Attributes:
        index: Its place in the order of reduction.
        flat: All of it: gradients, and the ledger in the last one.
        num_bytes: Size of `flat`.
        buffer: The gradients.
        slots: The places of the gradients.
        absent: Slots that no backward of this rank fills (static graph).
        idle: Slots that the present backward does not fill.
        pending: How many gradients the present backward still owes.
        work: The reduction, once started.
        result: What a communication hook returned.
    """

    __slots__ = (
        "absent",
        "buffer",
        "flat",
        "idle",
        "index",
        "num_bytes",
        "pending",
        "result",
        "slots",
        "work",
    )

    def __init__(self, index: int, flat: torch.Tensor, slots: Sequence[Slot]) -> None:
        self.index, self.flat, self.slots = index, flat, list(slots)
        self.num_bytes = flat.numel() * flat.element_size()
        self.buffer = flat
        self.absent: list[Slot] = []
        self.idle: list[Slot] = []
        self.pending = len(self.slots)
        self.work: Work | None = None
        self.result: torch.futures.Future[object] | None = None
        self.expect()

    @property
    def sparse(self) -> SparseSlot | None:
        """The one slot of a bucket of sparse entries."""
        first = self.slots[0] if self.slots else None
        return first if isinstance(first, SparseSlot) else None

    def expect(self) -> None:
        """Take over how often each slot expects a gradient."""
        self.absent = [slot for slot in self.slots if not slot.expected]
        self.reset()

    def reset(self) -> None:
        """Get ready for the next backward."""
        self.idle = list(self.absent)
        self.pending = len(self.slots) - len(self.idle)
        self.work, self.result = None, None


class Regions:
    """The memory of all buckets: one block a kind.

    Args:
        slots: All slots there will ever be.
        extra: Elements that the last bucket carries beside its gradients.
        allocate: Makes a block of elements; collective, where it is shared memory.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        extra: int,
        allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor],
    ) -> None:
        self._slots, self._extra = list(slots), extra
        device = slots[0].parameter.device
        kinds = {_region_of(s): 0 for s in slots if not _is_sparse(s)}
        self._of_ledger = next(iter(kinds), (torch.float32, device))
        numels = {**kinds, self._of_ledger: 0}
        for slot in slots:
            if not _is_sparse(slot):
                numels[_region_of(slot)] += slot.parameter.numel() + _aligned(1, slot.dtype)
        self._blocks: Mapping[tuple[torch.dtype, torch.device], torch.Tensor] = {
            (dtype, where): allocate(numel + extra + _aligned(1, dtype), dtype, where)
            for (dtype, where), numel in numels.items()
        }

    def lay_out(self, plan: Sequence[Sequence[Slot]]) -> list[Bucket]:
        """Cut the regions into the buckets of `plan`; slots move to their new places.

        Returns:
            The buckets, of which the last one is dense and has room for the ledger; it may have no
            gradients at all.
        """
        for slot in self._slots:  # also those that the plan leaves out
            slot.leave()
        plan = list(plan)
        if not plan or _is_sparse(plan[-1][0]):
            plan.append(())
        filled = dict.fromkeys(self._blocks, 0)
        buckets: list[Bucket] = []
        for index, slots in enumerate(plan):
            last = index == len(plan) - 1
            if slots and _is_sparse(slots[0]):
                slots[0].place(torch.empty(0), index, 0)
                buckets.append(Bucket(index, torch.empty(0), slots))
                continue
            key = _region_of(slots[0]) if slots else self._of_ledger
            numel = sum(s.parameter.numel() for s in slots)
            start = filled[key]
            end = start + numel + (self._extra if last else 0)
            filled[key] = _aligned(end, key[0])
            flat = self._blocks[key][start:end]
            offset = int(flat.storage_offset())
            for slot in slots:
                slot.place(flat, index, offset)
                offset += slot.parameter.numel()
            bucket = Bucket(index, flat, slots)
            bucket.buffer = flat[:numel]
            buckets.append(bucket)
        return buckets


def _region_of(slot: Slot) -> tuple[torch.dtype, torch.device]:
    return (slot.dtype, slot.parameter.device)


def _is_sparse(slot: Slot) -> bool:
    return isinstance(slot, SparseSlot)


def _aligned(numel: int, dtype: torch.dtype) -> int:
    """Round a number of elements up, so that what follows is aligned."""
    step = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
    return -(-numel // step) * step


class GradBucket:
    """What a communication hook sees of a bucket (torch's interface, and `group` and `names`).

    Attributes:
        group: The ranks that the gradients are averaged over.
    """

    __slots__ = ("_bucket", "_buffer", "_last", "group")

    def __init__(self, bucket: Bucket, last: bool, group: ProcessGroup) -> None:
        self._bucket, self._last, self.group = bucket, last, group
        sparse = bucket.sparse
        self._buffer = bucket.buffer if sparse is None else sparse.take()

    def index(self) -> int:
        """Return the bucket's number; they are handed to the hook in this order."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """Return this rank's gradients as one flat tensor [n]; not yet divided by anything.

        That of a sparse gradient is the sparse tensor itself.
        """
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the bucket's gradients, in the shapes of their parameters.

        They share the memory of `buffer`, also after `set_buffer`.
        """
        slots = self._bucket.slots
        if self._bucket.sparse is not None:
            return [self._buffer]
        if self._buffer is self._bucket.buffer:
            return [slot.view for slot in slots]
        parts = self._buffer.split([slot.view.numel() for slot in slots])
        return [
            part.as_strided(slot.view.shape, slot.view.stride(), part.storage_offset())
            for part, slot in zip(parts, slots, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that the gradients belong to."""
        return [slot.parameter for slot in self._bucket.slots]

    def names(self) -> list[str]:
        """Return the parameters' paths in the module: they stay when buckets are cut anew."""
        return [slot.name for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Tell whether this is the last bucket of the backward."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the flat tensor that `buffer` returns, e.g. by a compressed one."""
        self._buffer = tensor
