"""Gradients stored in flat buffers, and how a buffer receives each of them.

A *grad view* has a tensor that shares its flat buffer's memory and becomes the parameter's
``.grad``. Autograd adds into it in place, the collective reduces it in place, and the optimizer
reads it there: nothing is copied. Only the first gradient after ``zero_grad()``, which sets
``.grad`` to None, arrives in a tensor of autograd's own and is copied in once.

It has the strides of its parameter if those are dense. It is not a view in autograd's sense,
so ``grad.detach_()`` works on it. A program that keeps a gradient (``g = p.grad``) over
``zero_grad(set_to_none=True)`` keeps its values: the grad view sees that its tensor is held and
moves the holder's to memory of its own before writing. The same happens when buffers are laid out
again, so that gradients which are being accumulated are carried over.

A program may also give the tensor other memory: ``module.double().float()`` and ``module.to()``
assign ``grad.data``, on the very tensor that was the grad view's. A grad view therefore compares
the address of its tensor, and makes a new one if that has changed. A parameter that now has another
dtype, device or shape does not fit its buffer any more (`adopt` returns False).

Three kinds differ.

*Parts.* The buffer has the part of a parameter that is a DTensor, and ``.grad`` is a DTensor
over it with the parameter's placements; one that comes with others is brought to these first.

*Sparse.* The gradient of an embedding with ``sparse=True`` lies nowhere: its size changes from step
to step. Its entries are handed over when the buffer is reduced, and the result is shown.

*Cast.* A gradient that is reduced in another dtype than it is kept in. The flat buffer is made in
the dtype of the reduction, so that half the bits are half the bytes on every path, and no copy of a
complete buffer is ever made. The gradient stays a separate tensor, in its parameter's dtype; it is
cast into the buffer when it is complete, and the result is cast back:

    backward -> p.grad float32 --cast--> view bfloat16 -> all_reduce -> view --cast--> p.grad

Memory: the gradients, and the buffers beside them (half of that for 16 bits).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from dure.tensor.dtensor import DTensor
from dure.tensor.redistribute import redistribute
from dure.tensor.spec import TensorMeta, spec_of
from dure.training import autograd_hooks
from dure.training.flat_buffers import Kind, dense_strides

__all__ = [
    "DORMANT",
    "CastGradView",
    "CastPartGradView",
    "GradView",
    "NamedParameter",
    "PartGradView",
    "SparseGradView",
    "own_part",
    "part_in",
    "unreduced_gradient",
]

_grad: Any = torch.Tensor.grad  # pyright: ignore

# What sys.getrefcount says of an object that only a grad view's attribute refers to.
_REFS_OF_UNHELD_VIEW = 2

DORMANT = -1
"""The buffer's index of a grad view that is in none: no rank uses its parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameter:
    """A parameter and its path in the module."""

    name: str
    parameter: torch.nn.Parameter
    sparse: bool = False
    """Its gradients are sparse, and stay so."""


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's memory of a parameter: of a DTensor, its local part."""
    return getattr(tensor, "_local_tensor", tensor)


def unreduced_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return ``.grad`` as autograd has left it: reading that of a DTensor reduces it first."""
    return _grad.__get__(parameter)


def part_in(gradient: DTensor, like: DTensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return this rank's part of a gradient in the placements of `like`, its parameter.

    Args:
        gradient: In any placements: pending reductions are carried out.
        like: The parameter.
        dtype: In which they are, and the result is; None for the gradient's own.

    Collective:
        All ranks of the mesh.
    """
    part, spec = gradient.part.detach(), gradient.spec
    if dtype is not None and part.dtype != dtype:
        part = part.to(dtype)
        spec = spec_of(spec.mesh, spec.placements, TensorMeta(spec.shape, spec.meta.stride, dtype))
    return redistribute(part, spec, spec.with_placements(like.spec.placements))


class GradView:
    """The place of one parameter's gradient in its flat buffer.

    Threads:
        Used by one thread at a time; its owner's lock sees to it.

    Attributes:
        number: The parameter's, in the order of registration.
        dtype: In which the gradient is reduced.
        buffer_index: The flat buffer that it is in, or `DORMANT`.
        tensor: The place itself.
        expected: How often a backward adds to the gradient.
        left: How often the present backward still will.
        used: Whether it got a gradient since the last reduction.
        node: Accumulates the gradient in autograd's graphs.
    """

    __slots__ = (
        "_address",
        "_flat",
        "_has_format",
        "_offset",
        "_saved",
        "_shape",
        "buffer_index",
        "dtype",
        "expected",
        "left",
        "name",
        "node",
        "number",
        "parameter",
        "tensor",
        "used",
    )

    def __init__(self, number: int, named: NamedParameter, dtype: torch.dtype) -> None:
        self.number, self.name, self.parameter = number, named.name, named.parameter
        self.dtype = dtype
        self._shape = own_part(named.parameter).shape
        self._has_format = len(self._shape) in (4, 5)  # which `to(memory_format=...)` changes
        self.node = _accumulator(named.parameter)
        self.buffer_index = DORMANT
        self.expected = self.left = 1
        self.used = False
        # Not what holds the buffer: a cycle would keep its shared memory until the garbage
        # collector comes round.
        self._flat = self.tensor = torch.empty(0, device="cpu")
        self._offset = self._address = 0
        self._saved: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Bytes of the gradient in its flat buffer."""
        return self.numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        """Elements of the gradient in its flat buffer."""
        return self._shape.numel()

    @property
    def kind(self) -> Kind:
        """The kind of flat buffer that can hold it."""
        return (self.dtype, self.parameter.device)

    def place(self, flat: torch.Tensor, buffer_index: int, offset: int) -> None:
        """Lie in `flat` from now on; `leave` comes first if it lay somewhere else.

        What was accumulated since the last reduction (`no_sync`) comes along.
        """
        self._flat, self._offset, self.buffer_index = flat, offset, buffer_index
        self._make_tensor()
        if self.used and self.parameter.grad is not None:
            self.adopt()

    def leave(self) -> None:
        """Give the values to whoever holds the view, such as the parameter; lie nowhere."""
        if self.buffer_index == DORMANT:
            return
        if sys.getrefcount(self.tensor) > _REFS_OF_UNHELD_VIEW:
            self.tensor.data = self.tensor.clone()
        self.buffer_index = DORMANT
        self._flat = self.tensor = torch.empty(0, device="cpu")
        self._address = self.tensor.data_ptr()

    def will_be_filled(self) -> bool:
        """Return whether the running backward adds to the gradient; call it during a backward."""
        reach = autograd_hooks.will_reach
        return reach(self.node) or (self.refresh() and reach(self.node))

    def refresh(self) -> bool:
        """Find the present `node`; return whether it is another one.

        A parameter gets a new one when its dtype or device changes, even if it changes back. Where
        torch swaps tensors for that (`torch.__future__`, and always for DTensors), autograd also
        loses the parameter's hooks, which are put back.
        """
        if not self.parameter.requires_grad:
            return False
        before, self.node = self.node, _accumulator(self.parameter)
        if self.node is before:
            return False
        autograd_hooks.restore(self.parameter)
        return True

    def adopt(self) -> bool:
        """Make sure that the parameter's gradient is stored in the buffer.

        Returns:
            False if it does not fit: the parameter has another dtype, device or shape than when
            the buffer was made.
        """
        if self.tensor.data_ptr() != self._address:
            self._make_tensor()
        gradient = self._gradient()
        assert gradient is not None
        if gradient is self.tensor:
            return True
        # Detached: with create_graph the gradient has a history, which the buffer must not get.
        values = gradient.detach() if gradient.requires_grad else gradient
        if values.layout is not torch.strided:
            values = values.to_dense()
        if self._has_format and values.stride() != self.tensor.stride():
            self._make_tensor()  # optimizers want the parameter's strides
        self._free_view()
        if not self._show():
            return False
        self.tensor.copy_(values)
        return True

    def fits(self) -> bool:
        """Return whether the parameter's gradient still has a place in the buffer; see `adopt`."""
        return _has_same_layout(own_part(self.parameter), self.tensor)

    def recollect(self) -> bool:
        """At the start of a backward: find out what became of a gradient that is to be reduced.

        Programs drop or replace gradients that they accumulated under `no_sync`. A gradient that
        is gone counts as never used: the place still has its values, which must not be shown.

        Returns:
            What `adopt` does.
        """
        if self.parameter.grad is None:
            self.used = False
            return True
        return self.adopt()

    def contribute_unused(self) -> None:
        """Fill the buffer for a gradient that this rank did not compute.

        A gradient left over from an earlier step (a program that does not call zero_grad) is the
        same on all ranks; contributing it makes the average come out as if it had been added
        afterwards. It is saved, so that nothing changes where no rank uses the parameter.
        """
        if self.tensor.data_ptr() != self._address:
            self._make_tensor()
        gradient = self._gradient()
        if gradient is self.tensor:
            self._saved = self.tensor.clone()
            return
        self._free_view()
        with torch.no_grad():
            if gradient is None or not self.fits():
                self.tensor.zero_()
            else:
                self.tensor.copy_(gradient)

    def contribute_nothing(self) -> None:
        """Fill the buffer with zeros: this rank only accompanies the others' step.

        Its own old gradient is dropped: the rest of it would differ from those of the others.
        """
        self.parameter.grad = None
        self._free_view()
        with torch.no_grad():
            self.tensor.zero_()

    def settle(self, used_somewhere: bool) -> None:
        """After the reduction: show the result, or leave the gradient as it was."""
        if used_somewhere:
            if self._gradient() is not self.tensor:
                self._show()
        elif self._saved is not None:
            self.tensor.copy_(self._saved)
        self._saved = None

    def _gradient(self) -> torch.Tensor | None:
        """Return what of the parameter's gradient is to be stored here."""
        return self.parameter.grad

    def _show(self) -> bool:
        """Make the place the parameter's gradient; return False if it does not fit."""
        try:
            self.parameter.grad = self.tensor
        except RuntimeError:  # torch compares dtype, device and shape
            return False
        return True

    def _free_view(self) -> None:
        """Before overwriting the view: give its old values to whoever still holds it."""
        if sys.getrefcount(self.tensor) <= _REFS_OF_UNHELD_VIEW:
            return
        self.tensor.data = self.tensor.clone()
        self._make_tensor()

    def _make_tensor(self) -> None:
        """Make `tensor` again, in the strides that the parameter has now."""
        like = own_part(self.parameter)
        if like.shape != self._shape:  # which `adopt` finds
            like = torch.empty(self._shape, device="meta")
        self.tensor = _alias(self._flat, self._offset, like)
        self._address = self.tensor.data_ptr()


def _accumulator(parameter: torch.Tensor) -> Any:
    """Return what accumulates a leaf's gradient."""
    return torch.autograd.graph.get_gradient_edge(parameter).node


def _has_same_layout(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (tensor.dtype, tensor.device, tensor.shape) == (other.dtype, other.device, other.shape)


def _alias(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor shaped as `like` over `flat`'s memory, not a view for autograd."""
    alias = torch.empty(0, dtype=flat.dtype, device=flat.device)
    alias.set_(flat.untyped_storage(), offset, tuple(like.shape), dense_strides(like))  # pyright: ignore[reportUnknownMemberType]
    return alias


class PartGradView(GradView):
    """The place of this rank's part of a gradient that is a DTensor, as its parameter is.

    A gradient that lies otherwise, such as terms of a sum, is brought to its parameter's placements
    when it is complete: a collective of the parameter's mesh.
    """

    __slots__ = ()

    def _gradient(self) -> torch.Tensor | None:
        parameter: Any = self.parameter
        gradient = parameter.grad
        if gradient is None:
            return None
        if gradient.placements != parameter.placements:
            gradient = gradient.detach().redistribute(placements=parameter.placements)
        return gradient._local_tensor

    def _show(self) -> bool:
        if not self.fits():
            return False
        parameter: Any = self.parameter
        parameter.grad = type(parameter)(self.tensor, parameter._spec)
        return True


class SparseGradView(GradView):
    """The entries of one sparse gradient [rows, ...], of which each rank has some rows.

    A gradient that is dense all the same, as where the weight is also used by another layer, is
    reduced as entries too and shown as a dense one.

    Args:
        reduce_dtype: In which entries are reduced; None for that of the gradient.
    """

    __slots__ = ("_reduce_dtype",)

    def __init__(
        self, number: int, named: NamedParameter, reduce_dtype: torch.dtype | None
    ) -> None:
        super().__init__(number, named, named.parameter.dtype)
        self._reduce_dtype = reduce_dtype

    def place(self, flat: torch.Tensor, buffer_index: int, offset: int) -> None:
        """Belong to a buffer, without memory in it."""
        self.buffer_index = buffer_index

    def leave(self) -> None:
        """Belong to no buffer."""
        self.buffer_index = DORMANT

    def adopt(self) -> bool:
        """Leave the gradient where it is."""
        return True

    def fits(self) -> bool:
        """Return True: entries are taken as they are."""
        return True

    def contribute_unused(self) -> None:
        """Hand over a gradient that is left over, or no entries."""
        gradient = self.parameter.grad
        self.tensor = self._empty() if gradient is None else self._entries(gradient)

    def contribute_nothing(self) -> None:
        """Hand over no entries."""
        self.parameter.grad = None
        self.tensor = self._empty()

    def take(self) -> torch.Tensor:
        """Return this rank's entries, to be summed in place."""
        gradient = self.parameter.grad
        if self.used and gradient is not None:
            self.tensor = self._entries(gradient)
        return self.tensor

    def settle(self, used_somewhere: bool) -> None:
        """Show the result as the parameter's gradient, if there is one."""
        if used_somewhere:
            gradient = self.parameter.grad
            dense = gradient is not None and gradient.layout is torch.strided
            result = self.tensor.to(self.parameter.dtype)
            self.parameter.grad = result.to_dense() if dense else result
        self.tensor = self._empty()

    def _entries(self, gradient: torch.Tensor) -> torch.Tensor:
        values = gradient.detach()
        entries = values.to_sparse(1) if values.layout is torch.strided else values
        return entries.to(self._reduce_dtype or entries.dtype, copy=True)

    def _empty(self) -> torch.Tensor:
        p = self.parameter
        return torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=p.device),
            torch.empty((0, *p.shape[1:]), dtype=self._reduce_dtype or p.dtype, device=p.device),
            tuple(p.shape),
            check_invariants=False,
            device=p.device,
        )


class CastGradView(GradView):
    """The place of a gradient in a flat buffer of another dtype; it is never `p.grad` itself."""

    __slots__ = ()

    def adopt(self) -> bool:
        """Cast the parameter's gradient of any dtype into the buffer."""
        values = self._values()
        if values.shape != self._shape:
            return False
        self.tensor.copy_(values if values.layout is torch.strided else values.to_dense())
        return True

    def _values(self) -> torch.Tensor:
        """Return this rank's gradient, or part of it."""
        gradient = self.parameter.grad
        assert gradient is not None
        return gradient.detach()

    def fits(self) -> bool:
        """Return whether the gradient still has a place in the buffer."""
        return own_part(self.parameter).shape == self._shape

    def contribute_unused(self) -> None:
        """Fill the buffer for a gradient that this rank did not compute."""
        if self.parameter.grad is None:
            self.contribute_nothing()
        else:
            self.adopt()

    def contribute_nothing(self) -> None:
        """Fill the buffer with zeros; an old gradient of this rank's own goes (see `GradView`)."""
        self.parameter.grad = None
        with torch.no_grad():
            self.tensor.zero_()

    def settle(self, used_somewhere: bool) -> None:
        """After the reduction: cast the result back, or leave the gradient as it was."""
        if used_somewhere:
            gradient = self.parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                self.parameter.grad = self.tensor.to(self.parameter.dtype)
            else:
                gradient.detach().copy_(self.tensor)


class CastPartGradView(CastGradView):
    """The place of this rank's part of a DTensor's gradient, in a flat buffer of another dtype.

    Reductions over the parameter's own mesh are in that dtype, too.
    """

    __slots__ = ()

    def _values(self) -> torch.Tensor:
        parameter: Any = self.parameter
        gradient: Any = unreduced_gradient(parameter)
        return part_in(gradient, parameter, self.dtype)

    def settle(self, used_somewhere: bool) -> None:
        """After the reduction: cast the result back, or leave the gradient as it was."""
        if used_somewhere:
            parameter: Any = self.parameter
            part = self.tensor.to(parameter.dtype)
            parameter.grad = type(parameter)(part, parameter._spec)
