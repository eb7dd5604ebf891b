"""One parameter of a sharded module: its shard, and the whole that modules compute with.

    module.weight   between steps: the shard, an nn.Parameter that is a DTensor. Optimizers have it.
                    in forward and backward: the whole, an nn.Parameter of its own, plain, or a
                    DTensor of the tensor-parallel mesh.

Autograd fills the whole's ``.grad``. The group reduces it, and what is this rank's becomes the
shard's ``.grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dure.errors import ModuleError
from dure.mesh import DeviceMesh
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.optimizers import forget_replaced, note_replaced
from dure.parallel.fsdp.policies import MixedPrecisionPolicy
from dure.tensor.dtensor import DTensor, wrap
from dure.tensor.placement_types import Placement, Replicate, chunk
from dure.tensor.spec import DTensorSpec, TensorMeta, spec_of
from dure.training.mapped_files import Files

__all__ = ["FSDPParameter"]


class FSDPParameter:
    """A parameter that a `fully_shard` call manages.

    Args:
        parameter: What the modules have; plain, or a DTensor over other axes of the mesh.
        places: Every (module, attribute) that has it.
        dim: The dimension to cut.
        axes: Over which.
        policy: In which dtype modules compute with the whole.
        files: What keeps the shard, its gradient and its optimizer state in files; or None.

    Attributes:
        name: Its path in the root module, for messages.
        sharded: The nn.Parameter of this rank's shard, a DTensor.
        whole: The nn.Parameter that modules compute with; None before it was first needed.
        whole_shape: Of the whole, or of this rank's tensor-parallel part of it.
        dim: The dimension that is cut.
        axes, policy, files: As given.
        dtype: Of the whole.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        places: list[tuple[nn.Module, str]],
        dim: int,
        axes: DataAxes,
        policy: MixedPrecisionPolicy,
        files: Files | None = None,
    ) -> None:
        self.files = files
        self.name = places[0][1]
        self.places, self.dim, self.axes, self.policy = places, dim, axes, policy
        self._inner = parameter.spec if isinstance(parameter, DTensor) else None
        local = parameter.part if isinstance(parameter, DTensor) else parameter.detach()
        self.whole_shape = local.shape
        self.spec = self._spec(parameter)
        size, offset = chunk(local.shape[dim], axes.size, axes.rank)
        # A copy, so that the memory of the whole can be freed.
        part = local.narrow(dim, offset, size).clone(memory_format=torch.contiguous_format)
        self.sharded: nn.Parameter = self._as_parameter(
            wrap(part, self.spec), parameter.requires_grad
        )
        self._choose_dtype()
        forget_replaced(parameter)  # a tied one may be taken a second time
        for key, value in vars(parameter).items():
            setattr(self.sharded, key, value)
        note_replaced(parameter, self)
        self._gradient_room: torch.Tensor | None = None
        self.whole: nn.Parameter | None = None
        self.accumulated: torch.Tensor | None = None

    def _spec(self, parameter: torch.Tensor) -> DTensorSpec:
        """Return the spec of the shard: over the data axes, then over those that it had."""
        meta = TensorMeta(parameter.shape, tuple(_dense_strides(parameter.shape)), parameter.dtype)
        if self._inner is None:
            placements = self.axes.placements(self.dim, (), ())
            return spec_of(self.axes.mesh, tuple(placements), meta)
        inner_mesh, inner = self._inner.mesh, self._inner.placements
        if self.axes.whole is not None and inner_mesh == self.axes.whole:
            return spec_of(inner_mesh, self._within(inner_mesh, inner), meta)
        mesh = DeviceMesh._concatenate([self.axes.mesh, inner_mesh])  # pyright: ignore[reportPrivateUsage]
        placements = self.axes.placements(self.dim, inner, inner_mesh.shape)
        return spec_of(mesh, (*placements, *inner), meta)

    def _within(self, mesh: DeviceMesh, inner: Sequence[Placement]) -> tuple[Placement, ...]:
        """Return the placements of a parameter whose mesh has the data axes already."""
        names, data = mesh.mesh_dim_names or (), self.axes.mesh.mesh_dim_names or ()
        others = [i for i, n in enumerate(names) if n not in data]
        cut = self.axes.placements(
            self.dim, [inner[i] for i in others], [mesh.shape[i] for i in others]
        )
        made = list(inner)
        for name, placement in zip(data, cut, strict=True):
            at = names.index(name)
            if not isinstance(inner[at], Replicate):
                raise ModuleError(
                    "the parameter is divided over a data-parallel axis already",
                    op="fully_shard",
                    parameters=(self.name,),
                    seen=f"{inner[at]} on axis {name!r}",
                )
            made[at] = placement
        return tuple(made)

    def _as_parameter(self, tensor: torch.Tensor, requires_grad: bool) -> nn.Parameter:
        return nn.Parameter(tensor, requires_grad=requires_grad)

    @property
    def part(self) -> torch.Tensor:
        """The values of this rank's shard."""
        sharded: Any = self.sharded
        return sharded.part

    @property
    def is_trained(self) -> bool:
        """Whether it needs a gradient; it may be frozen after `fully_shard`, on all ranks."""
        return self.sharded.requires_grad

    @property
    def version(self) -> int:
        """A number that changes when this rank's shard is written in place."""
        return self.sharded._version + self.part._version

    def has_changed(self) -> None:
        """Let autograd refuse what it has saved of the whole, whose values are others now."""
        if self.whole is not None:
            torch.autograd.graph.increment_version(self.whole)

    def adopt(self) -> bool:
        """Take the parameter that the module has now, if it was replaced; tell whether it was.

        ``to_empty``, ``to(dtype)``, ``load_state_dict(assign=True)`` do so, or change what it is.
        """
        module, name = self.places[0]
        found: Any = module._parameters[name]  # pyright: ignore[reportPrivateUsage]
        same = found is self.sharded or found is self.whole
        if same and self._spec_of(self.sharded) is self.spec:
            return False
        if same:
            found = self.sharded
        if not isinstance(found, DTensor) or found.spec.placements != self.spec.placements:
            raise ModuleError(
                "a sharded parameter was replaced by what is no shard of it",
                op="FSDP forward",
                parameters=(self.name,),
                seen=str(getattr(found, "spec", None) or tuple(found.shape)),
                fix="Assign a DTensor of the same mesh and placements, or copy_ the values.",
            )
        note_replaced(self.sharded, self)
        self.sharded, self.spec = found, found.spec  # pyright: ignore[reportAttributeAccessIssue]
        self._gradient_room = None
        self.whole = None
        self._choose_dtype()
        return True

    @staticmethod
    def _spec_of(sharded: Any) -> DTensorSpec:
        return sharded.spec

    def _choose_dtype(self) -> None:
        low = self.policy.param_dtype if self.sharded.is_floating_point() else None
        self.dtype = self.sharded.dtype if low is None else low

    def mark_files(self) -> None:
        """Let optimizers know where to keep the state of the shard."""
        if self.files is not None:
            self.sharded._dure_files = self.files  # pyright: ignore

    # ---------------------------------------------------------------- what modules have

    def show_sharded(self) -> None:
        """Let modules have the shard."""
        self._show(self.sharded)

    def show_whole(self, tensor: torch.Tensor) -> None:
        """Let modules have the whole, whose values lie in `tensor` [whole_shape]."""
        if self.whole is None:
            made = tensor
            if self._inner is not None:
                meta = TensorMeta(self._inner.shape, self._inner.meta.stride, self.dtype)
                made = wrap(tensor, spec_of(self._inner.mesh, self._inner.placements, meta))
            self.whole = self._as_parameter(made, self.sharded.requires_grad)
        self.whole.requires_grad_(self.sharded.requires_grad)
        self._show(self.whole)

    def _show(self, parameter: nn.Parameter) -> None:
        for module, name in self.places:
            if "_flat_weights" in module.__dict__:  # recurrent layers keep a list besides
                setattr(module, name, parameter)
            else:
                module._parameters[name] = parameter  # pyright: ignore[reportPrivateUsage]

    # ---------------------------------------------------------------- gradients

    def take_gradient(self, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Return the whole's gradient, with what was accumulated before, and forget both.

        Args:
            dtype: To accumulate in; None leaves it.
        """
        self.accumulate(dtype)
        gradient, self.accumulated = self.accumulated, None
        return gradient

    def accumulate(self, dtype: torch.dtype | None) -> None:
        """Move the whole's gradient aside; it is reduced at a later backward."""
        if self.whole is None or self.whole.grad is None:
            return
        gradient: Any = self.whole.grad
        self.whole.grad = None
        if isinstance(gradient, DTensor):
            assert self._inner is not None
            if gradient.spec.placements != self._inner.placements:
                gradient = gradient.redistribute(placements=self._inner.placements)
            gradient = gradient.part
        if dtype is not None and gradient.dtype != dtype and self.accumulated is not None:
            gradient = gradient.to(dtype)
        if self.accumulated is None:
            self.accumulated = gradient
        else:
            self.accumulated = self.accumulated.to(gradient.dtype).add_(gradient)

    def give_gradient(self, part: torch.Tensor) -> None:
        """Add this rank's part of the reduced gradient to the shard's."""
        part = part.to(self.sharded.dtype)
        if self.sharded.grad is None:
            if self.files is not None:
                part = self._in_file(part, self.files)
            self.sharded.grad = wrap(part, self.spec)
        else:
            grad: Any = self.sharded.grad
            grad.part.add_(part)

    def _in_file(self, part: torch.Tensor, files: Files) -> torch.Tensor:
        """Return a gradient in this parameter's file for it."""
        room = self._gradient_room
        if room is None or room.dtype != part.dtype:
            room = self._gradient_room = files.zeros(part.shape, part.dtype)
        return room.copy_(part)


def _dense_strides(shape: torch.Size) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return strides
