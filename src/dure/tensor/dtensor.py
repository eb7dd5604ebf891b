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

import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn, Self

import torch

from dure.comm.capture import capturing, refuse_in_jit_trace
from dure.comm.pending import wait_tensor
from dure.comm.untraced import untraced_below
from dure.errors import MeshError, PlacementError, ShapeError, UsageError, UsageWarning
from dure.mesh import DeviceMesh, current_mesh
from dure.mesh.device_mesh import restore_mesh
from dure.tensor import dispatch
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
from dure.tensor.redistribute import Move, redistribute, way_of
from dure.tensor.registry import OtherStrides, by_value
from dure.tensor.spec import DTensorSpec, TensorMeta, as_placements, spec_of
from dure.tensor.strides import laid
from dure.tensor.terms import averaged_over, gradient_of_term, needs_terms, selected_by
from dure.trace.ring import call_site

try:
    from dure.tensor import _hits as native  # pyright: ignore[reportMissingModuleSource]
except ImportError:  # not built here: the same in Python, slower
    native = None

__all__ = [
    "DTensor",
    "from_part",
    "mesh_or_current",
    "native",
    "part_of",
    "parts_of",
    "to_target",
    "wrap",
]

_make = torch.Tensor._make_wrapper_subclass  # pyright: ignore
_in_inference = torch.is_inference_mode_enabled
_grad: Any = torch.Tensor.grad  # pyright: ignore
_get_grad = _grad.__get__
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
        if not _one_memory(self.part, source):  # of what was moved for the view
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
            grad = _divided(grad, self.spec)
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
                    grad = _moved(grad, placements, name_of(self))
                _grad.__set__(self, grad)
        return grad

    def _set_grad(self, value: torch.Tensor | None) -> None:
        _grad.__set__(self, value)

    def _delete_grad(self) -> None:
        _grad.__delete__(self)

    grad = property(_read_grad, _set_grad, _delete_grad)  # pyright: ignore

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


def _wrap(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor over a part that needs no gradient."""
    if _in_inference():  # torch cannot make a view of an ordinary wrapper one of inference
        with torch.inference_mode(False):
            return _wrap(local, spec)
    meta = spec.meta
    made = _make(DTensor, meta.shape, strides=meta.stride, dtype=meta.dtype, device=local.device)
    made.part = local
    made.spec = spec
    made.copied_at = None
    return made


def _parts(
    tensors: Sequence[torch.Tensor | None], specs: list[DTensorSpec | None]
) -> list[Any] | None:
    """Return the part of each tensor that lies as its spec says; None where one does not.

    Where the spec is None, what is no DTensor is returned as it is. Views that are copies are none.
    """
    found: list[Any] = []
    for tensor, spec in zip(tensors, specs, strict=True):
        if type(tensor) is DTensor and tensor.spec is spec and tensor.copied_at is None:
            found.append(tensor.part)
        elif spec is None and type(tensor) is not DTensor:
            found.append(tensor)
        else:
            return None
    return found


wrap = _wrap if native is None else native.wrap
parts_of = _parts if native is None else native.parts
dispatch.bind(DTensor, wrap)
_slow_dispatch = DTensor.__dict__["__torch_dispatch__"]


def use_native(on: bool) -> None:
    """Let the extension dispatch operators, or Python; tests compare the two."""
    DTensor.__torch_dispatch__ = (  # pyright: ignore[reportAttributeAccessIssue]
        classmethod(native.dispatch) if on and native is not None else _slow_dispatch
    )


if native is not None:
    native.bind(
        dtensor=DTensor,
        tensor=torch.Tensor,
        spec=DTensorSpec,
        meta=TensorMeta,
        plan=dispatch.Plan,
        plans=dispatch.plans,
        by_value=by_value,
        make=_make,
        in_inference=_in_inference,
        strided=torch.strided,
        grad=_grad,
        slow_dispatch=dispatch.dispatch,
        slow_wrap=_wrap,
        slow_grad=DTensor._read_grad,  # pyright: ignore[reportPrivateUsage]
    )
    DTensor.grad = property(  # pyright: ignore
        native.read_grad,
        DTensor._set_grad,  # pyright: ignore[reportPrivateUsage]
        DTensor._delete_grad,  # pyright: ignore[reportPrivateUsage]
        DTensor._read_grad.__doc__,  # pyright: ignore[reportPrivateUsage]
    )
    native.copy_after(OtherStrides)
    use_native(True)


@untraced_below
def from_part(
    local: torch.Tensor, spec: DTensorSpec, grads: tuple[Placement | None, ...] | None = None
) -> DTensor:
    """Wrap a part for autograd, as `DTensor.from_local` does, whose checks were made.

    Args:
        local: The part.
        spec: Of the tensor.
        grads: What the gradient is redistributed to; None stands for Replicate, unless the gradient
            is Partial: then it stays so.
    """
    if not (local.requires_grad and torch.is_grad_enabled()):
        refuse_in_jit_trace("DTensor.from_local")
        outside = spec.coordinate is None
        return wrap(spec.part_outside() if outside else local.detach(), spec)
    return _FromLocal.apply(local, spec, grads)  # pyright: ignore


@untraced_below
def to_target(
    tensor: DTensor,
    target: DTensorSpec,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Move for autograd, as `DTensor.redistribute` does, whose checks were made."""
    dispatch.check_copy("redistribute", tensor)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return _redistributed(tensor, target, async_op, forward_dtype)
    dtypes = forward_dtype, backward_dtype
    return _Redistribute.apply(tensor, target, async_op, *dtypes)  # pyright: ignore


def part_of(
    tensor: DTensor,
    grads: tuple[Placement, ...] | None = None,
    unsaid: tuple[str, DTensorSpec] | None = None,
) -> torch.Tensor:
    """Return a rank's part to autograd.

    Args:
        tensor: The tensor.
        grads: The placements of the part's gradient; None: those of the tensor, with Replicate in
            place of Partial.
        unsaid: The method that the program called without `grad_placements`, and the spec of the
            tensor that it was called on: for a warning if the gradient is ambiguous.
    """
    refuse_in_jit_trace("a DTensor")
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return wait_tensor(tensor.part)
    told = None
    if unsaid is not None and (tensor.ndim or tensor.is_leaf) and _open_axes(tensor.spec):
        told = (*unsaid, call_site())
    return _ToLocal.apply(tensor, grads, told)  # pyright: ignore


def _open_axes(spec: DTensorSpec) -> list[int]:
    """Return the axes along which a part's gradient may be whole or terms."""
    placed = enumerate(zip(spec.mesh.shape, spec.placements, strict=True))
    return [axis for axis, (n, placement) in placed if n > 1 and not placement.is_shard()]


_told: set[str] = set()
"""Lines of the program that were warned about what `to_local` or `full_tensor` assumes."""


def _warn_of_assumption(op: str, spec: DTensorSpec, site: str, axes: Sequence[int]) -> None:
    """Warn, once for each line, that a gradient may be terms and is taken as the same on all."""
    if site in _told:
        return
    _told.add(site)
    names = spec.mesh.mesh_dim_names
    along = " and ".join(names[axis] if names else f"axis {axis}" for axis in axes)
    file, _, line = site.rpartition(":")
    warnings.warn_explicit(
        f"{op}() of {spec}: its gradient was taken to be the same on all ranks of {along}. "
        "If ranks use the result for different things, each has a term of the gradient, and the "
        "sum is lost: pass grad_placements, with Partial() for these axes; with Replicate() "
        "if it is the same. (Shown once for this line.)",
        UsageWarning,
        file,
        int(line),
    )


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


def _moved(grad: DTensor, placements: Sequence[Placement], name: str = "") -> DTensor:
    """Return a gradient with other placements; it has a history in a backward that keeps one."""
    spec = grad.spec
    target = spec.with_placements(placements)
    if target is spec and grad.copied_at is None:
        return grad
    if grad.requires_grad and torch.is_grad_enabled():
        return _Redistribute.apply(grad, target, False, None, None)  # pyright: ignore
    return wrap(redistribute(grad.part, spec, target, name=name), target.compact())


def _divided(grad: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a gradient as a DTensor, also where torch's formulas made a plain one.

    Some, such as that of `sgn`, make zeros of the full shape from nothing: every rank has them.

    Args:
        grad: The gradient, a DTensor or the full one.
        spec: Of the tensor whose gradient it is.
    """
    if isinstance(grad, DTensor):
        return grad
    if grad._is_zerotensor():  # it has no memory
        grad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    full = spec_of(spec.mesh, spec.replicated().placements, TensorMeta.of(grad))
    return _moved(wrap(grad, full), spec.without_terms().placements)


class _FromLocal(torch.autograd.Function):
    """Wraps a part; its gradient is the part of the DTensor's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        spec: DTensorSpec,
        grads: tuple[Placement | None, ...] | None,
    ) -> DTensor:
        ctx.spec = spec
        ctx.grads = spec.without_terms().placements if grads is None else grads
        if spec.partial and needs_terms(spec):
            ctx.save_for_backward(wait_tensor(local))
        if capturing((local,)):  # a graph of the forward alone has other gradients than DTensors
            return wrap(local.detach(), spec)
        outside = spec.coordinate is None
        return wrap(spec.part_outside() if outside else local.view_as(local), spec)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        spec = ctx.spec
        if spec.coordinate is None:
            return None, None, None
        grad = _divided(grad_outputs[0], spec)
        placements: list[Placement] = [
            wanted or (lies if lies.is_partial() else Replicate())
            for wanted, lies in zip(ctx.grads, grad.spec.placements, strict=True)
        ]
        # A rank uses its copy of a Partial tensor's gradient for its own term alone: what comes
        # back for the copies, in a second backward, are terms.
        back = _of_second_backward(spec.placements, placements, Partial())
        part = part_of(_moved(grad, placements), back)
        term = ctx.saved_tensors[0] if ctx.saved_tensors else None
        return gradient_of_term(part, term, spec), None, None


class _ToLocal(torch.autograd.Function):
    """Unwraps a part; its gradient becomes the DTensor's."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        grads: tuple[Placement, ...] | None,
        told: tuple[str, DTensorSpec, str] | None,
    ) -> torch.Tensor:
        ctx.spec, ctx.grads, ctx.told = tensor.spec, grads, told
        local = wait_tensor(tensor.part)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,), source = grad_outputs, ctx.spec
        if ctx.told is not None:
            op, before, site = ctx.told
            _warn_of_assumption(op, before, site, _open_axes(source))
        reduced = source.without_terms()
        spec = (reduced if ctx.grads is None else source.with_placements(ctx.grads)).compact()
        if grad._is_zerotensor():
            grad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
        if grad.dtype != spec.meta.dtype:
            spec = spec.with_dtype(grad.dtype)
        grad = laid(grad, spec.order)
        if source.partial:
            grad = _gradient_of_value(grad, source, spec)
        if not (grad.requires_grad and torch.is_grad_enabled()):
            return wrap(grad, spec), None, None
        # A term's gradient was wrapped as the value's: what comes back for it may stay a term.
        back = _of_second_backward(source.placements, spec.placements, None)
        return from_part(grad, spec, back), None, None


def _of_second_backward(
    forward: Sequence[Placement], backward: Sequence[Placement], of_terms: Any
) -> tuple[Any, ...]:
    """Return the placements of what comes back for a gradient, in a second backward.

    Args:
        forward: The tensor's placements.
        backward: Its gradient's.
        of_terms: Stands for an axis that has terms of the tensor, and copies of the gradient.
    """
    return tuple(
        Replicate() if there.is_partial()
        else of_terms if here.is_partial() and there.is_replicate()
        else there
        for here, there in zip(forward, backward, strict=True)
    )  # fmt: skip


def _gradient_of_value(grad: torch.Tensor, source: DTensorSpec, spec: DTensorSpec) -> torch.Tensor:
    """Return the gradient of a value, given that of this rank's term of it.

    Raises:
        PlacementError: The value is a maximum, minimum or product.
    """
    op = selected_by(source)
    if op is not None:
        raise PlacementError(
            f"the gradient of one rank's term does not determine that of a {op}",
            op="to_local",
            seen=f"a gradient for the part of {source}",
            fix="Reduce it first: redistribute(placements=[Replicate()]).to_local(), or "
            "full_tensor().",
        )
    n = averaged_over(source)
    return grad if n == 1 else grad * n


def _redistributed(
    tensor: DTensor, target: DTensorSpec, async_op: bool, dtype: torch.dtype | None
) -> DTensor:
    """Return a tensor with other placements, cast before it is moved; outside of autograd."""
    spec, local = tensor.spec, tensor.part
    if dtype is not None and dtype != local.dtype:
        local = local.to(dtype)
        spec, target = spec.with_dtype(dtype), target.with_dtype(dtype)
    moved = redistribute(local, spec, target, async_op)
    if moved is local:
        return wrap(local if async_op else local.view_as(local), target)
    if way_of(spec, target).steps[-1].move is Move.SLICE and _one_memory(moved, local):
        moved = moved.clone()  # a slice shares memory with the whole, which may be written
    return wrap(moved, target.compact())


def _one_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class _Redistribute(torch.autograd.Function):
    """Moves; the gradient moves back, but not to terms: theirs is whole on each rank."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        target: DTensorSpec,
        async_op: bool,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> DTensor:
        ctx.placements, ctx.target = tensor.spec.without_terms().placements, target
        ctx.dtypes = tensor.spec.meta.dtype, backward_dtype
        return _redistributed(tensor, target, async_op, forward_dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad: Any = _divided(grad_outputs[0], ctx.target)
        dtype, backward_dtype = ctx.dtypes
        if backward_dtype is not None and grad.dtype != backward_dtype:
            grad = grad.to(backward_dtype)
        placements = tuple(
            there if there.is_partial() and here.is_replicate() else here
            for here, there in zip(ctx.placements, grad.spec.placements, strict=True)
        )
        grad = _moved(grad, placements)
        return (grad if grad.dtype == dtype else grad.to(dtype)), None, None, None, None
