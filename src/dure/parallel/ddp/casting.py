"""Gradients that are reduced in another dtype than they are kept in.

The bucket is made in the dtype of the reduction, so that half the bits are half the bytes on every
road, and no copy of a whole bucket is ever made. A gradient stays a tensor of its own, in its
parameter's dtype; it is cast into its slot when it is complete, and the average is cast back.

    backward -> p.grad float32 --cast--> slot bfloat16 -> all_reduce -> slot --cast--> p.grad

Memory: the gradients, and the buckets beside them (half of that for 16 bits).
"""

from __future__ import annotations

import torch

from dure.parallel.ddp.slots import Slot

__all__ = ["CastSlot"]


class CastSlot(Slot):
    """The place of a gradient in a bucket of another dtype; it is never `p.grad` itself."""

    __slots__ = ()

    def adopt(self) -> None:
        """Cast the parameter's gradient into the bucket."""
        gradient = self.parameter.grad
        assert gradient is not None
        values = gradient.detach()
        self.view.copy_(values if values.layout is torch.strided else values.to_dense())

    def contribute_unused(self) -> None:
        """Fill the bucket for a gradient that this rank did not compute."""
        if self.parameter.grad is None:
            self.contribute_nothing()
        else:
            self.adopt()

    def contribute_nothing(self) -> None:
        """Fill the bucket with zeros; an old gradient of this rank's own goes (see `Slot`)."""
        self.parameter.grad = None
        with torch.no_grad():
            self.view.zero_()

    def settle(self, used_somewhere: bool) -> None:
        """After the reduction: cast the result back, or leave the gradient as it was."""
        if used_somewhere:
            gradient = self.parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                self.parameter.grad = self.view.to(self.parameter.dtype)
            else:
                gradient.detach().copy_(self.view)
