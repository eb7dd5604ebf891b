"""The place of one parameter's gradient, and what its bucket is given for it.

A *slot* is a tensor that shares its bucket's memory and becomes the parameter's ``.grad``. Autograd
adds into it in place, the collective reduces it in place, and the optimizer reads it there: nothing
is copied. Only the first gradient after ``zero_grad()``, which sets ``.grad`` to None, arrives in a
tensor of autograd's own and is copied in once.

Slots lie in the strides of their parameter where those are dense. They are not views in autograd's
sense, so ``grad.detach_()`` works on them. A program that keeps a gradient (``g = p.grad``) over
``zero_grad(set_to_none=True)`` keeps its values: the slot sees that it is held and moves the
holder's tensor to memory of its own before writing. The same happens when buckets are laid out
anew, so that gradients which are being accumulated are carried over.

The gradient of an embedding with ``sparse=True`` has no such place: its size changes from step to
step. A *sparse slot* hands its entries over when its bucket is reduced, and shows the result.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from dure.comm.agreement import dense_strides

__all__ = ["DORMANT", "NamedParameter", "Slot", "SparseSlot"]

# What sys.getrefcount says of an object that only a slot's attribute refers to.
_REFS_OF_UNHELD_VIEW = 2

DORMANT = -1
"""The bucket's index of a slot that is in none: nobody uses its parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameter:
    """A parameter and its path in the module."""

    name: str
    parameter: torch.nn.Parameter
    sparse: bool = False
    """Its gradients are sparse, and stay so."""


class Slot:
    """The place of one parameter's gradient in its bucket.

    Threads: used by one thread at a time; the reducer's lock sees to it.

    Attributes:
        number: The parameter's, in the order of registration.
        dtype: In which the gradient is reduced.
        bucket_index: The bucket that it is in, or `DORMANT`.
        view: The place itself.
        expected: How often a backward adds to the gradient.
        left: How often the present backward still will.
        used: Whether it got a gradient since the last reduction.
        node: What accumulates the gradient in autograd's graphs.
    """

    __slots__ = (
        "_flat",
        "_saved",
        "bucket_index",
        "dtype",
        "expected",
        "left",
        "name",
        "node",
        "number",
        "parameter",
        "used",
        "view",
    )

    def __init__(self, number: int, named: NamedParameter, dtype: torch.dtype) -> None:
        self.number, self.name, self.parameter = number, named.name, named.parameter
        self.dtype = dtype
        self.node = torch.autograd.graph.get_gradient_edge(named.parameter).node
        self.bucket_index = DORMANT
        self.expected = self.left = 1
        self.used = False
        # Not the bucket itself: a cycle would keep its shared memory until the garbage collector
        # comes round.
        self._flat = self.view = torch.empty(0)
        self._saved: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Bytes of the gradient in its bucket."""
        return self.parameter.numel() * self.dtype.itemsize

    def place(self, flat: torch.Tensor, bucket_index: int, offset: int) -> None:
        """Lie in `flat` from now on; `leave` comes first if it lay somewhere else.

        What was accumulated since the last reduction (`no_sync`) comes along.
        """
        self._flat, self.bucket_index = flat, bucket_index
        self.view = _alias(flat, offset, self.parameter)
        if self.used and self.parameter.grad is not None:
            self.adopt()

    def leave(self) -> None:
        """Give the values to whoever holds the view, such as the parameter; lie nowhere."""
        if self.bucket_index == DORMANT:
            return
        if sys.getrefcount(self.view) > _REFS_OF_UNHELD_VIEW:
            self.view.data = self.view.clone()
        self.bucket_index = DORMANT
        self._flat = self.view = torch.empty(0)

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

    def recollect(self) -> None:
        """At the begin of a backward: see what became of a gradient that waits to be reduced.

        Programs drop or replace gradients that they accumulated under `no_sync`. What is gone
        counts as never used: the place still has its values, which nobody shall see again.
        """
        if self.parameter.grad is None:
            self.used = False
        else:
            self.adopt()

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


class SparseSlot(Slot):
    """The entries of one sparse gradient [rows, ...], of which each rank has some rows.

    A gradient that is dense all the same, as where the weight is also used by another layer, is
    reduced as entries too and shown as a dense one.
    """

    __slots__ = ()

    def place(self, flat: torch.Tensor, bucket_index: int, offset: int) -> None:
        """Belong to a bucket: there is nothing to lie in."""
        self.bucket_index = bucket_index

    def leave(self) -> None:
        """Belong to no bucket."""
        self.bucket_index = DORMANT

    def adopt(self) -> None:
        """Leave the gradient where it is."""

    def contribute_unused(self) -> None:
        """Hand over a gradient that is left over, or no entries."""
        gradient = self.parameter.grad
        self.view = self._empty() if gradient is None else self._entries(gradient)

    def contribute_nothing(self) -> None:
        """Hand over no entries."""
        self.parameter.grad = None
        self.view = self._empty()

    def take(self) -> torch.Tensor:
        """Return this rank's entries, to be summed in place."""
        gradient = self.parameter.grad
        if self.used and gradient is not None:
            self.view = self._entries(gradient)
        return self.view

    def settle(self, used_somewhere: bool) -> None:
        """Show the result as the parameter's gradient, if there is one."""
        if used_somewhere:
            gradient = self.parameter.grad
            dense = gradient is not None and gradient.layout is torch.strided
            self.parameter.grad = self.view.to_dense() if dense else self.view
        self.view = self._empty()

    @staticmethod
    def _entries(gradient: torch.Tensor) -> torch.Tensor:
        values = gradient.detach()
        return (values.to_sparse(1) if values.layout is torch.strided else values).clone()

    def _empty(self) -> torch.Tensor:
        p = self.parameter
        return torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=p.device),
            torch.empty((0, *p.shape[1:]), dtype=p.dtype, device=p.device),
            tuple(p.shape),
            check_invariants=False,
        )
