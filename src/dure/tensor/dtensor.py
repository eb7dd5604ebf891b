"""`DTensor`: a tensor of which each rank of a mesh holds a part.

It is a `torch.Tensor` without memory of its own, below autograd: autograd sees one tensor of the
whole shape, and every operator that it runs, forward or backward, arrives at `dispatch` with the
specs of its operands. So gradients are DTensors too, and get their placements as results do.

A gradient that autograd leaves as terms of a sum (`Partial`), where its tensor is not, is reduced
when `.grad` is first read, once: several backward passes add their terms before.

Threads: as any tensor. Collective: an operator that has to move an operand, and reading a value
(`item`, a reduced `.grad`), are collectives of the mesh: all its ranks run the same. `repr` and
`print` show this rank's part, and send nothing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn, Self

import torch

from dure.comm.untraced import untraced_below
from dure.errors import MeshError, PlacementError, ShapeError, UsageError, UsageWarning
from dure.mesh import DeviceMesh, current_mesh
from dure.mesh.device_mesh import restore_mesh
from dure.tensor import dispatch, state, wrapping
from dure.tensor.autograd import (
    divided_gradient,
    from_part,
    have_one_memory,
    moved_gradient,
    part_of,
    to_target,
)
from dure.tensor.checking import check_parts
from dure.tensor.parameter_names import name_of
from dure.tensor.placement_types import (
    MaskPartial,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from dure.tensor.plain_tensors import index_on
from dure.tensor.spec import DTensorSpec, TensorMeta, as_placements, spec_of
from dure.tensor.terms import needs_terms
from dure.tensor.wrapping import wrap

__all__ = ["DTensor", "mesh_or_current", "safe_globals"]

_grad: Any = torch.Tensor.grad  # pyright: ignore
_get_grad = _grad.__get__
_get_item: Any = torch.Tensor.__getitem__
_data: Any = torch.Tensor.data  # pyright: ignore


def mesh_or_current(mesh: DeviceMesh | None, op: str) -> DeviceMesh:
    """Return a mesh that was given, or the one of the innermost ``with mesh:``."""
    mesh = current_mesh() if mesh is None else mesh
    if mesh is None:
        raise MeshError(
            "no mesh was given", op=op, fix="Pass device_mesh, or call within `with mesh:`."
        )
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MeshError(
            "device_mesh is not a DeviceMesh of Dure",
            op=op,
            seen=f"{mesh!r}, a {type(mesh).__module__}.{type(mesh).__name__}",
            fix="dure.device_mesh.init_device_mesh makes one.",
        )
    return mesh


class DTensor(torch.Tensor):
    """A tensor of which each rank of a mesh holds a part; see the head of this file.

    Made by `distribute_tensor`, `DTensor.from_local`, the factories of `dure.tensor`, and by
    operators on DTensors. Its shape is that of the whole.
    """

    __slots__ = ("copied_at", "part", "spec")
    part: torch.Tensor
    """What this rank has."""
    spec: DTensorSpec
    copied_at: int | None
    """Version of the tensor that this is a moved copy of, where torch would give a view."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    def __new__(
        cls, local_tensor: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False
    ) -> Self:
        """Wrap a part without a check, and without history; `from_local` keeps both."""
        if local_tensor.requires_grad and not requires_grad:
            warnings.warn(
                "To construct a DTensor whose gradient flows to its part, use DTensor.from_local: "
                "DTensor(...) detaches the part.",
                UsageWarning,
                stacklevel=2,
            )
        made = wrap(local_tensor.detach() if local_tensor.requires_grad else local_tensor, spec)
        return made.requires_grad_(requires_grad)  # pyright: ignore[reportReturnType]

    @classmethod
    @untraced_below
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator on the parts (dispatch.py). Any: what the operator takes and gives.

        Where the extension is there it stands in this function's place, and calls `dispatch` for
        what is no hit.
        """
        return dispatch.dispatch(func, args, kwargs)

    # ---------------------------------------------------------------- in and out

    @staticmethod
    @untraced_below
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: torch.Size | None = None,
        stride: tuple[int, ...] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """Make a DTensor of the parts that the ranks have.

        Args:
            local_tensor: This rank's part. It is not copied.
            device_mesh: The mesh; that of ``with mesh:`` where None.
            placements: One for each mesh axis; replicated where None.
            run_check: Compare shapes and dtypes of all ranks' parts, and copy replicated ones from
                the first rank of each axis.
            shape, stride: Of the whole; both are needed where parts are uneven. Else the parts
                are taken to be of one shape.
            grad_placements: The placements that the gradient of the tensor is redistributed to;
                if None, `placements`, with Replicate in place of Partial. `local_tensor` gets its
                part of that. With Partial("avg") it gets 1 / n of it; with "max" and "min" zeros,
                except where it has the value and no rank before has the same; with "product" it
                is multiplied by the other ranks' terms.

        Raises:
            PlacementError: Placements do not fit the tensor or the mesh.
            ShapeError: The part's shape is not the one that `shape` leaves for this rank.
            Desync: With `run_check`: parts do not fit together.

        Collective:
            None without `run_check`; the backward, if the gradient has to be redistributed, and
            for Partial("max"), "min" and "product".

        Cost:
            A few microseconds.
        """
        mesh = mesh_or_current(device_mesh, "DTensor.from_local")
        given = as_placements(
            placements, mesh, local_tensor.ndim, "DTensor.from_local", local_tensor.dtype
        )
        if (shape is None) != (stride is None):
            raise ShapeError("shape and stride are given together", op="DTensor.from_local")
        try:
            if shape is None or stride is None:
                part = local_tensor.shape, local_tensor.stride(), local_tensor.dtype
                meta = _whole(*part, mesh.shape, given)
            else:
                meta = TensorMeta(torch.Size(shape), tuple(stride), local_tensor.dtype)
            spec = spec_of(mesh, given, meta)
        except TypeError:
            _check_sizes(local_tensor)
            raise
        grads = None
        if grad_placements is not None:
            grads = as_placements(grad_placements, mesh, local_tensor.ndim, "DTensor.from_local")
            _check_grads_of_terms(spec, grads)
        if shape is not None and local_tensor.shape != spec.local_shape and spec.coordinate:
            raise ShapeError(
                "the part has another shape than the whole leaves for this rank",
                op="DTensor.from_local",
                rank=mesh.get_rank(),
                seen=f"{list(local_tensor.shape)}, expected {list(spec.local_shape)} of {spec}",
            )
        if run_check:
            local_tensor = check_parts(local_tensor, spec)
        return from_part(local_tensor, spec, grads)

    @untraced_below
    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's part, which shares memory with the DTensor.

        Args:
            grad_placements: The placements of the gradient that the part gets in backward: if
                None, those of the tensor, with Replicate in place of Partial. A replicated tensor
                that ranks use differently gets a gradient of terms: ``[Partial()]``.

        Raises:
            PlacementError: In backward, of Partial("max"), "min" and "product": the gradient of
                a term does not determine that of the value.

        Warns:
            UsageWarning: Once for each line that calls, at the first backward: ranks have copies or
                terms of the tensor, and `grad_placements` is None. A tensor without dimensions
                that operators returned, such as a loss, is exempt.

        Cost:
            None; a moved tensor is waited for.
        """
        dispatch.check_copy("to_local", self)
        grads = None
        if grad_placements is not None:
            grads = as_placements(grad_placements, self.spec.mesh, self.ndim, "to_local")
        part = part_of(self, grads, None if grads is not None else ("to_local", self.spec))
        if getattr(self, "_is_param", False):
            part = part.view_as(part)
            part._is_param = True  # pyright: ignore
        return part

    @untraced_below
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the full tensor, on every rank: a plain one, of this tensor's shape.

        Args:
            grad_placements: The placements of the gradient that the full tensor gets in backward:
                if None, Replicate, so every rank's must be the same. If ranks use the full
                tensor differently, each has a term of the gradient: ``[Partial()]``.

        Warns:
            UsageWarning: As `to_local`, if `grad_placements` is None.

        Collective:
            All ranks of the mesh.

        Cost:
            An all_gather or all_reduce for each axis that cuts the tensor or has terms of it.
        """
        whole = (Replicate(),) * self.spec.mesh.ndim
        grads = None
        if grad_placements is not None:
            grads = as_placements(grad_placements, self.spec.mesh, self.ndim, "full_tensor")
        unsaid = None if grads is not None else ("full_tensor", self.spec)
        return part_of(self.redistribute(placements=whole), grads, unsaid)

    @untraced_below
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return this tensor with other placements.

        Args:
            device_mesh: The tensor's own; another is refused.
            placements: One for each mesh axis.
            async_op: Return while the last collective runs; who uses the values waits.
            forward_dtype: What the values are cast to before they are moved.
            backward_dtype: What the gradient is cast to before it is moved.

        Raises:
            PlacementError: `Partial` is asked for where it is not; placements do not fit.
            MeshError: Another mesh.

        Collective:
            All ranks of the mesh.

        Cost:
            That of the plan's steps (redistribute.py): S to R gathers, R to S costs nothing,
            P to R reduces, P to S reduces and scatters, S to S exchanges.
        """
        spec = self.spec
        dispatch.check_copy("redistribute", self)
        if device_mesh is not None and device_mesh != spec.mesh:
            raise MeshError(
                "a DTensor stays on its mesh",
                op="redistribute",
                seen=f"{spec.mesh!r}, asked for {device_mesh!r}",
            )
        if placements is None:
            raise PlacementError("redistribute needs placements", op="redistribute")
        given = as_placements(placements, spec.mesh, self.ndim, "redistribute", self.dtype)
        for axis, (old, new) in enumerate(zip(spec.placements, given, strict=True)):
            if new.is_partial() and old != new:
                raise PlacementError(
                    "a tensor cannot be redistributed to Partial",
                    op="redistribute",
                    seen=f"{old} -> {new} on axis {axis}",
                    fix="Redistribute to Replicate or Shard; distribute_tensor() and "
                    "DTensor.from_local() make Partial tensors.",
                )
        target = spec.with_placements(given)
        return to_target(self, target, async_op, forward_dtype, backward_dtype)

    # ---------------------------------------------------------------- what it is

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self.spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How it lies along each axis of the mesh."""
        return self.spec.placements

    @property
    def _local_tensor(self) -> torch.Tensor:
        """This rank's part, under torch's name."""
        return self.part

    @property
    def _spec(self) -> DTensorSpec:
        """What is known without values, under torch's name."""
        return self.spec

    def storage_offset(self) -> int:
        """Return where a view begins in the memory of the full tensor that it is a view of."""
        base = self._base
        if type(base) is not DTensor or self.spec.coordinate is None:
            return 0
        offset, source, full = int(self.part.storage_offset()), base.part, base.spec.meta.stride
        if not have_one_memory(self.part, source):  # of what was moved for the view
            source, full = self.part, self.spec.meta.stride
        else:
            offset -= int(source.storage_offset())
        strides: list[tuple[int, int]] = [*zip(map(int, source.stride()), full, strict=True)]
        found = 0
        for own, whole in sorted(strides, reverse=True):
            if own:
                found, offset = found + offset // own * whole, offset % own
        return found + offset

    def _read_data(self) -> torch.Tensor:
        """The tensor without autograd; setting it takes over another DTensor's part and spec."""
        made = _data.__get__(self)
        if self.copied_at is not None:
            made.copied_at = made._version  # it counts writes by itself
        return made

    def _set_data(self, value: torch.Tensor) -> None:
        if type(value) is not DTensor:
            raise UsageError(
                "the data of a DTensor is a DTensor",
                op="DTensor.data",
                seen=f"{type(value).__name__} {list(value.shape)}",
                fix="distribute_tensor() it, or copy_() into the part: to_local().",
            )
        dispatch.check_copy("DTensor.data", value, writes=True)
        _data.__set__(self, value)
        self.part, self.spec, self.copied_at = value.part, value.spec, None

    data = property(_read_data, _set_data)  # pyright: ignore

    @untraced_below
    def _read_grad(self) -> torch.Tensor | None:
        """The gradient, with this tensor's placements where it would be terms of a sum.

        Collective:
            The first read after backward, where autograd left terms: all ranks of the mesh. If
            one rank alone reads it, or ranks read it of different parameters of modules,
            `Desync` names the lines.
        """
        grad = _get_grad(self)
        if grad is not None and type(grad) is not DTensor:
            grad = divided_gradient(grad, self.spec)
            _grad.__set__(self, grad)
        copied = type(grad) is DTensor and grad.copied_at is not None  # it is autograd's, no view
        if type(grad) is DTensor and (copied or grad.spec.partial):
            spec = grad.spec
            placements = tuple(
                here if there.is_partial() and not here.is_partial() else there
                for here, there in zip(self.spec.placements, spec.placements, strict=True)
            )
            if copied or placements != spec.placements:
                with torch.set_grad_enabled(grad.requires_grad):  # of backward(create_graph=True)
                    grad = moved_gradient(grad, placements, name_of(self))
                _grad.__set__(self, grad)
        return grad

    def _set_grad(self, value: torch.Tensor | None) -> None:
        _grad.__set__(self, value)

    def _delete_grad(self) -> None:
        _grad.__delete__(self)

    grad = property(_read_grad, _set_grad, _delete_grad)  # pyright: ignore

    def __getitem__(self, index: Any) -> Any:
        """Return a view or a selection; lists of numbers and ranges count as replicated."""
        return _get_item(self, index_on(self.spec.mesh, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index_on(self.spec.mesh, index), value)

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Register a backward hook, as `torch.Tensor.register_hook`.

        The hook is the program's: plain tensors beside DTensors are refused in it.
        """

        @functools.wraps(hook)
        def run(grad: torch.Tensor) -> Any:
            with state.within_hook():
                return hook(grad)

        return super().register_hook(run)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Return this rank's part, mesh and placements, as `print` does. Sends nothing.

        So one rank alone may print a tensor; ``full_tensor()`` returns all values.
        """
        return (
            f"DTensor(local_tensor={self.part}, device_mesh={self.spec.mesh!r}, "
            f"placements={self.spec.placements})"
        )

    def __str__(self) -> str:
        """Return what `repr` does, but refuse a copy that a write made stale."""
        dispatch.check_copy("print", self)
        return repr(self)

    def __format__(self, spec: str) -> str:
        """Format a single element as its number, a collective of the mesh; others as `repr`."""
        return format(self.item(), spec) if self.ndim == 0 else format(str(self), spec)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the parts, for torch's tools; a compiler is told to run what has DTensors as is.

        Tracing would call collectives on tensors without values.
        """
        if torch._guards.TracingContext.try_get() is not None:  # pyright: ignore
            raise torch._dynamo.exc.Unsupported(  # pyright: ignore
                "Dure's DTensors are not traced: this function runs uncompiled"
            )
        return ["part"], (self.spec, self.requires_grad)

    def __create_write_items__(self, fqn: str, value: object) -> NoReturn:
        """Refuse torch's checkpoints: each rank would save its part as if it were alone.

        Raises:
            UsageError: Always.
        """
        raise _for_torch(fqn)

    def __create_chunk_list__(self) -> NoReturn:
        """Refuse to be loaded from torch's checkpoints; see `__create_write_items__`."""
        raise _for_torch("")

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: Any, size: torch.Size, stride: tuple[int, ...]
    ) -> DTensor:
        spec, requires_grad = context
        meta = TensorMeta(torch.Size(size), tuple(stride), spec.meta.dtype)
        made = wrap(inner["part"], spec_of(spec.mesh, spec.placements, meta))
        return made.requires_grad_(requires_grad)  # pyright: ignore[reportReturnType]

    def __reduce_ex__(self, protocol: Any) -> Any:
        dispatch.check_copy("pickle", self)
        part = self.part.detach()
        parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (part, self.spec, self.requires_grad, parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if not self.is_leaf:
            raise RuntimeError("only tensors that the program made support deepcopy, no results")
        if id(self) in memo:
            return memo[id(self)]
        dispatch.check_copy("deepcopy", self)
        part = self.part.detach().clone()
        made = _rebuild(part, self.spec, self.requires_grad, isinstance(self, torch.nn.Parameter))
        grad = _grad.__get__(self)
        if grad is not None:
            made.grad = grad.__deepcopy__(memo) if type(grad) is DTensor else grad.clone()
        memo[id(self)] = made
        return made


def _for_torch(name: str) -> UsageError:
    return UsageError(
        "torch.distributed.checkpoint met a DTensor of dure, whose other parts it cannot see",
        op="checkpoint",
        seen=name or "a DTensor",
        fix="Import the checkpoint's functions from dure: import dure.checkpoint as dcp.",
    )


def _rebuild(
    part: torch.Tensor, spec: DTensorSpec, requires_grad: bool, parameter: bool
) -> DTensor:
    made = wrap(part, spec)
    if parameter:
        return torch.nn.Parameter(made, requires_grad)  # pyright: ignore[reportReturnType]
    return made.requires_grad_(requires_grad)  # pyright: ignore[reportReturnType]


def safe_globals() -> list[Any]:
    """Return what `torch.load(weights_only=True)` needs to load DTensors, meshes and placements.

    Importing `dure.tensor` registers it. After `torch.serialization.clear_safe_globals()`, use
    ``torch.serialization.add_safe_globals(dure.tensor.safe_globals())``.
    """
    return [
        _rebuild, spec_of, restore_mesh, TensorMeta,
        Partial, Replicate, Shard, StridedShard, MaskPartial,
    ]  # fmt: skip


def _check_grads_of_terms(spec: DTensorSpec, grads: Sequence[Placement]) -> None:
    """Raise if a gradient that depends on the terms would be handed on before it is reduced."""
    if needs_terms(spec) and any(
        here.is_partial() and not there.is_replicate()
        for here, there in zip(spec.placements, grads, strict=True)
    ):
        raise PlacementError(
            "the gradient of a maximum, minimum or product is needed in full on each rank",
            op="DTensor.from_local",
            seen=f"{spec}, grad_placements {list(grads)}",
            fix="Pass Replicate() for the axes that are Partial, or leave grad_placements out.",
        )


def _check_sizes(local: torch.Tensor) -> None:
    """Raise if sizes are symbols, as in graphs with dynamic shapes."""
    if any(isinstance(size, torch.SymInt) for size in local.shape):
        raise UsageError(
            "the sizes of a DTensor must be numbers",
            op="DTensor.from_local",
            seen=f"symbols, {tuple(local.shape)}",
            fix="Capture the graph with fixed shapes.",
        )


@lru_cache(maxsize=1024)
def _whole(
    own: torch.Size,
    given: tuple[int, ...],
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> TensorMeta:
    """Return what the full tensor is, if all parts are like this one.

    Dimensions keep the order that they have in the part's memory, and the gaps.

    Args:
        own, given, dtype: The part's shape, strides and dtype.
        sizes: Of the mesh.
        placements: One for each axis of the mesh.
    """
    shape = list(own)
    for size, placement in zip(sizes, placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= size
    stride, factor, end = [0] * len(shape), 1, 1
    for dim in sorted(range(len(shape)), key=lambda d: (given[d], -d)):
        stride[dim] = given[dim] * factor if own[dim] > 1 else end  # of one element it says nothing
        if stride[dim] and own[dim]:
            factor *= shape[dim] // own[dim]
            end = stride[dim] * shape[dim]
    return TensorMeta(torch.Size(shape), tuple(stride), dtype)


wrapping.bind(DTensor)
dispatch.bind(DTensor)
