"""Gradients as views of flat, shared buckets.

Layout of a bucket's flat tensor, with k gradients in it:

    | gradient 0 | gradient 1 | ... | gradient k-1 | used (k) | missing (k) |
    |<----------------- buffer ------------------->|<-------- flags ------->|

A *slot* is the place of one gradient: a tensor that shares the bucket's memory and becomes the
parameter's ``.grad``. Autograd adds into it in place, the collective reduces it in place, and the
optimizer reads it there: nothing is copied. Only the first gradient after ``zero_grad()``, which
sets ``.grad`` to None, arrives in a tensor of autograd's own and is copied in once.

The *flags* ride along with the gradients and are averaged with them, so that one collective also
tells, for each gradient, whether any rank used it (the average of `used` is not 0) and whether any
rank lacks it (the average of `missing` is not 0). Two flags, because a count of n ranks could not
be told from n - 1 in 16 bits, while zero is zero in every format.

Slots lie without padding, in the strides of their parameter where those are dense. They are not
views in autograd's sense, so ``grad.detach_()`` works on them. A program that keeps a gradient
(``g = p.grad``) over ``zero_grad(set_to_none=True)`` keeps its values: the slot sees that it is
held and moves the holder's tensor to memory of its own before writing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dure.comm.agreement import dense_strides

if TYPE_CHECKING:
    from dure.comm.work import Work

__all__ = ["Bucket", "GradBucket", "Slot", "make_bucket"]

# What sys.getrefcount says of an object that only a slot's attribute refers to.
_REFS_OF_UNHELD_VIEW = 2


class Slot:
    """The place of one parameter's gradient in its bucket.

    Threads: used by one thread at a time; the reducer's lock sees to it.
    """

    __slots__ = ("_flat", "_saved", "bucket_index", "name", "parameter", "ready", "used", "view")

    def __init__(
        self, name: str, parameter: torch.nn.Parameter, bucket: Bucket, offset: int
    ) -> None:
        self.name, self.parameter = name, parameter
        # Not the bucket itself: a cycle would keep its shared memory until the garbage collector
        # comes round.
        self._flat, self.bucket_index = bucket.flat, bucket.index
        self.view = _alias(self._flat, offset, parameter)
        self.used = False  # got a gradient since the last reduction
        self.ready = False  # got a gradient in the present backward
        self._saved: torch.Tensor | None = None

    def adopt(self) -> None:
        """Make sure that the parameter's gradient lies in the bucket."""
        gradient = self.parameter.grad
        assert gradient is not None
        if gradient is self.view:
            return
        self._free_view()
        # Detached: with create_graph the gradient has a history, which the bucket must not get.
        values = gradient.detach() if gradient.requires_grad else gradient
        self.view.copy_(values if values.layout is torch.strided else values.to_dense())
        self.parameter.grad = self.view

    def contribute_unused(self) -> None:
        """Fill the bucket for a gradient that this rank did not compute.

        A gradient left over from an earlier step (a program that does not call zero_grad) is the
        same on all ranks; contributing it makes the average come out as if it had been added
        afterwards. It is saved, so that nothing changes where no rank uses the parameter.
        """
        if self.parameter.grad is self.view:
            self._saved = self.view.clone()
            return
        self._free_view()
        with torch.no_grad():
            if self.parameter.grad is None:
                self.view.zero_()
            else:
                self.view.copy_(self.parameter.grad)

    def contribute_nothing(self) -> None:
        """Fill the bucket with zeros: this rank only accompanies the others' step.

        Its own old gradient goes: what is left of it would not be that of the others.
        """
        self.parameter.grad = None
        self._free_view()
        with torch.no_grad():
            self.view.zero_()

    def settle(self, used_somewhere: bool) -> None:
        """After the reduction: show the result, or leave the gradient as it was."""
        if used_somewhere:
            if self.parameter.grad is not self.view:
                self.parameter.grad = self.view
        elif self._saved is not None:
            self.view.copy_(self._saved)
        self._saved = None
        self.used = self.ready = False

    def _free_view(self) -> None:
        """Before overwriting the view: give its old values to whoever still holds it."""
        if sys.getrefcount(self.view) <= _REFS_OF_UNHELD_VIEW:
            return
        offset = int(self.view.storage_offset())
        self.view.data = self.view.clone()
        self.view = _alias(self._flat, offset, self.parameter)


def _alias(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor shaped as `like` over `flat`'s memory, not a view for autograd."""
    alias = torch.empty(0, dtype=flat.dtype, device=flat.device)
    alias.set_(flat.untyped_storage(), offset, tuple(like.shape), dense_strides(like))  # pyright: ignore[reportUnknownMemberType]
    return alias


class Bucket:
    """Gradients that are reduced together; see the module's text for the layout.

    Attributes:
        index: Its place in the order of reduction.
        flat: All of it: gradients and flags.
        num_bytes: Size of `flat`.
        buffer: The gradients.
        slots: The places of the gradients.
        usual_flags: What the flags are where every rank has every gradient, before the average and
            after it.
        usual: The flags are that since the last step, and need not be written again.
        pending: How many gradients the present backward still owes.
        work: The reduction, once started.
    """

    __slots__ = (
        "buffer",
        "flags",
        "flat",
        "index",
        "num_bytes",
        "pending",
        "result",
        "slots",
        "usual",
        "usual_flags",
        "work",
    )

    def __init__(self, index: int, flat: torch.Tensor, num_gradients: int) -> None:
        self.index, self.flat = index, flat
        self.num_bytes = flat.numel() * flat.element_size()
        self.buffer = flat[: flat.numel() - 2 * num_gradients]
        self.flags = flat[flat.numel() - 2 * num_gradients :].view(2, num_gradients)
        self.usual_flags = torch.ones_like(self.flags)
        self.usual_flags[1] = 0
        self.usual = False
        self.slots: list[Slot] = []
        self.pending = num_gradients
        self.work: Work | None = None
        self.result: torch.futures.Future[object] | None = None

    def write_flags(self) -> None:
        """Tell the other ranks which gradients this rank has."""
        usual, self.usual = self.usual, False
        if usual and self.pending == 0:
            return
        self.flags.copy_(self.usual_flags)
        for i, slot in enumerate(self.slots):
            if not slot.used:
                self.flags[0, i] = 0
                # One that was frozen after the module was wrapped is not missed.
                self.flags[1, i] = int(slot.parameter.requires_grad)

    def contribute_nothing(self) -> None:
        """Fill all of it with zeros, the flags too: nothing is used, and nothing is missing."""
        for slot in self.slots:
            slot.contribute_nothing()
        self.flags.zero_()
        self.usual = False

    def settle(self) -> list[Slot]:
        """Point parameters to their results; return the slots that some rank did not use."""
        self.usual = torch.equal(self.flags, self.usual_flags)
        if self.usual or self._complete():
            for slot in self.slots:
                slot.settle(True)
            return []
        used, missing = self.flags
        for i, slot in enumerate(self.slots):
            slot.settle(bool(used[i]))
        return [slot for i, slot in enumerate(self.slots) if bool(missing[i])]

    def _complete(self) -> bool:
        used, missing = self.flags
        return bool(used.all()) and not bool(missing.any())

    def reset(self) -> None:
        """Get ready for the next backward."""
        self.pending, self.work, self.result = len(self.slots), None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameter:
    """A parameter and its path in the module."""

    name: str
    parameter: torch.nn.Parameter


def make_bucket(
    index: int,
    members: Sequence[NamedParameter],
    allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor],
    dtype: torch.dtype | None = None,
    make_slot: type[Slot] = Slot,
) -> Bucket:
    """Allocate the bucket of `members`, which are of one dtype and on one device.

    Args:
        index: Its place in the order of reduction.
        members: The parameters whose gradients lie in it, in this order.
        allocate: Makes a flat tensor of so many elements.
        dtype: Of the bucket; that of the parameters by default.
        make_slot: The kind of places in it.
    """
    numel = sum(m.parameter.numel() for m in members)
    first = members[0].parameter
    flat = allocate(numel + 2 * len(members), dtype or first.dtype, first.device)
    bucket = Bucket(index, flat, len(members))
    offset = int(flat.storage_offset())
    for member in members:
        bucket.slots.append(make_slot(member.name, member.parameter, bucket, offset))
        offset += member.parameter.numel()
    return bucket


class GradBucket:
    """What a communication hook sees of a bucket (torch's interface)."""

    __slots__ = ("_bucket", "_buffer", "_last")

    def __init__(self, bucket: Bucket, last: bool) -> None:
        self._bucket, self._last = bucket, last
        self._buffer = bucket.buffer

    def index(self) -> int:
        """Return the bucket's number; they are handed to the hook in this order."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """Return this rank's gradients as one flat tensor [n]; not yet divided by anything."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the bucket's gradients, in the shapes of their parameters."""
        return [slot.view for slot in self._bucket.slots]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that the gradients belong to."""
        return [slot.parameter for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Tell whether this is the last bucket of the backward."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the flat tensor that `buffer` returns, e.g. by a compressed one."""
        self._buffer = tensor
