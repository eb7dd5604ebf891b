"""`DTensor`: a tensor of which each rank of a mesh holds a part.

A DTensor is a `torch.Tensor` subclass without storage, below autograd: autograd sees one tensor of
the full shape, and every operator that it runs, forward or backward, arrives at `dispatch` with the
specs of its operands. So gradients are DTensors too, and their placements follow the same rules.

If autograd leaves a gradient `Partial` and its tensor is not, the gradient is reduced when `.grad`
is first read. Several backward passes add their terms before that one reduction.

Threads:
    As any tensor. Collective: operators that have to redistribute an operand, and reading a value
    (`item`, a Partial `.grad`), are collectives of the mesh: all its ranks must call them. `repr`
    and `print` show this rank's part and do not communicate.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn, Self

import torch

from dure import torch_private
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
    """Return `mesh`, or the one of the innermost ``with mesh:`` block if it is None."""
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
    """A tensor of which each rank of a mesh holds a part.

    Create one with `distribute_tensor`, `DTensor.from_local` or the factories of `dure.tensor`;
    operators on DTensors return DTensors. `shape`, `stride` and `numel` are those of the full
    tensor. If autograd leaves the gradient `Partial`, reading `.grad` reduces it.

    Threads:
        As any tensor.

    Collective:
        Operators that have to redistribute an operand, `item`, and the first read of a `.grad` that
        is Partial: all ranks of the mesh must call them in the same order. `print` shows this
        rank's part and does not communicate.

    Example:
        ```python
        from dure.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        weight = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        assert weight.shape == (4, 2) and weight.to_local().shape == (2, 2)
        x = distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])
        assert (x @ weight.t()).placements == (Shard(1),)
        ```
    """

    __slots__ = ("copied_at", "part", "spec")
    part: torch.Tensor
    """This rank's part."""
    spec: DTensorSpec
    copied_at: int | None
    """If this is a copy in the place of a view: the version of the source that was copied."""

    __torch_function__ = torch_private.disabled_torch_function_impl

    def __new__(
        cls, local_tensor: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False
    ) -> Self:
        """Wrap a part without checks and outside of autograd; `from_local` does both."""
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
        """Run an operator on the parts (dispatch.py).

        If the extension was built, it replaces this function and calls `dispatch` on a miss.
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
        """Create a DTensor from the parts that the ranks have.

        Args:
            local_tensor: This rank's part. It is not copied.
            device_mesh: The mesh; if None, the one of the enclosing ``with mesh:`` block.
            placements: One placement per mesh axis; if None, all are Replicate.
            run_check: Compare shapes and dtypes of all ranks' parts, and broadcast replicated parts
                from the first rank of each axis.
            shape, stride: Shape and strides of the full tensor; both are required if parts are
                uneven. If None, all parts are assumed to have the same shape.
            grad_placements: The placements that the gradient of the tensor is redistributed to;
                if None, `placements`, with Replicate in place of Partial. `local_tensor` gets its
                part of that gradient. With Partial("avg") it gets 1 / n of it. With "max" and
                "min" it gets the gradient of the elements that this rank is the first to hold, and
                zeros elsewhere. With "product" it gets the gradient times the other ranks' terms.

        Returns:
            The DTensor, differentiable with respect to `local_tensor`.

        Raises:
            MeshError: No mesh, or not one of Dure.
            PlacementError: Placements do not fit the tensor or the mesh.
            ShapeError: Only one of `shape` and `stride` was passed, or this rank's part has another
                shape than they imply.
            UsageError: Sizes of the part are symbols, as in graphs with dynamic shapes.
            Desync: With `run_check`: the parts do not make one tensor.

        Collective:
            With `run_check`, all ranks of the mesh. In backward, if the gradient has to be
            redistributed, and for Partial("max"), "min" and "product".

        Cost:
            A few microseconds.

        Example:
            ```python
            rows = torch.full((1, 3), float(dist.get_rank()))
            x = DTensor.from_local(rows, mesh, [Shard(0)])
            assert x.shape == (2, 3) and x.sum().item() == 3.0
            ```
        """
        mesh = mesh_or_current(device_mesh, "DTensor.from_local")
        given = as_placements(
            placements, mesh, local_tensor.ndim, "DTensor.from_local", local_tensor.dtype
        )
        if (shape is None) != (stride is None):
            raise ShapeError(
                "shape and stride must be passed together",
                op="DTensor.from_local",
                seen=f"shape={shape}, stride={stride}",
            )
        try:
            if shape is None or stride is None:
                part = local_tensor.shape, local_tensor.stride(), local_tensor.dtype
                meta = _full_meta(*part, mesh.shape, given)
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
                "the part does not have the shape that `shape` implies for this rank",
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
            grad_placements: The placements of the gradient that the part gets in backward; if
                None, those of the tensor, with Replicate in place of Partial. Pass ``[Partial()]``
                for a replicated tensor that the ranks use differently: its gradient is the sum of
                the ranks' gradients.

        Returns:
            The part, a plain tensor, differentiable with respect to the DTensor.

        Raises:
            PlacementError: The tensor is a view that had to be copied, and its source was written
                since. In backward of Partial("max"), "min" and "product": the gradient of a term
                does not determine the gradient of the value.

        Warns:
            UsageWarning: Once for each calling line, at the first backward, if the tensor is
                Replicate or Partial along an axis and `grad_placements` is None. Results of
                operators that have no dimensions, such as a loss, are exempt.

        Cost:
            None; waits for an asynchronous redistribution.

        Example:
            ```python
            x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
            assert x.to_local().tolist() == ([0.0, 1.0] if dist.get_rank() == 0 else [2.0, 3.0])
            ```
        """
        dispatch.check_copy("to_local", self)
        grads = None
        if grad_placements is not None:
            grads = as_placements(grad_placements, self.spec.mesh, self.ndim, "to_local")
        assumed_by = None if grads is not None else ("to_local", self.spec)
        part = part_of(self, grads, assumed_by)
        if getattr(self, "_is_param", False):
            part = part.view_as(part)
            part._is_param = True  # pyright: ignore
        return part

    @untraced_below
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the full tensor on every rank, as a plain tensor of this tensor's shape.

        Args:
            grad_placements: The placements of the gradient that the full tensor gets in backward;
                if None, Replicate: every rank's gradient must be the same. Pass ``[Partial()]`` if
                the ranks use the full tensor differently.

        Returns:
            The full tensor, differentiable with respect to the DTensor.

        Raises:
            PlacementError: As `to_local`.

        Warns:
            UsageWarning: As `to_local`, if `grad_placements` is None.

        Collective:
            All ranks of the mesh.

        Cost:
            One all_gather for each axis that shards the tensor, one all_reduce for each axis along
            which it is Partial.

        Example:
            ```python
            x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
            assert x.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]
            ```
        """
        replicated = (Replicate(),) * self.spec.mesh.ndim
        grads = None
        if grad_placements is not None:
            grads = as_placements(grad_placements, self.spec.mesh, self.ndim, "full_tensor")
        assumed_by = None if grads is not None else ("full_tensor", self.spec)
        return part_of(self.redistribute(placements=replicated), grads, assumed_by)

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
            device_mesh: None, or the tensor's mesh; a tensor cannot change its mesh.
            placements: One placement per mesh axis.
            async_op: Return while the last collective runs; the first use of the values waits.
            forward_dtype: Cast the values to this dtype before they are sent.
            backward_dtype: Cast the gradient to this dtype before it is sent.

        Returns:
            A DTensor, differentiable with respect to this one. It shares this tensor's memory if
            placements and dtype stay the same, and has its own otherwise.

        Raises:
            PlacementError: `Partial` was requested along an axis where the tensor is not Partial,
                placements do not fit, or the tensor is an outdated copy of a view.
            MeshError: Another mesh.

        Collective:
            All ranks of the mesh.

        Cost:
            With N bytes in the full tensor and n ranks per axis, a rank receives: S to R
            (all_gather) and P to S (reduce_scatter) (n - 1) / n * N; P to R (all_reduce) twice
            that; S to S (all_to_all) (n - 1) / n² * N; R to S nothing. The cheapest sequence of
            such steps is chosen.

        Example:
            ```python
            x = distribute_tensor(torch.arange(4.0).view(2, 2), mesh, [Shard(0)])
            columns = x.redistribute(placements=[Shard(1)])
            assert columns.to_local().shape == (2, 1)
            ```
        """
        spec = self.spec
        dispatch.check_copy("redistribute", self)
        if device_mesh is not None and device_mesh != spec.mesh:
            raise MeshError(
                "a DTensor cannot be redistributed to another mesh",
                op="redistribute",
                seen=f"its mesh is {spec.mesh!r}, device_mesh is {device_mesh!r}",
                fix="Omit device_mesh, or distribute_tensor(t.full_tensor(), mesh, placements).",
            )
        if placements is None:
            raise PlacementError("placements must be passed", op="redistribute")
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

    # ---------------------------------------------------------------- attributes

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self.spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement along each axis of the mesh."""
        return self.spec.placements

    @property
    def _local_tensor(self) -> torch.Tensor:
        """This rank's part, under torch's name."""
        return self.part

    @property
    def _spec(self) -> DTensorSpec:
        """Mesh, placements, shape, strides and dtype, under torch's name."""
        return self.spec

    def storage_offset(self) -> int:
        """Return the offset of a view in the memory of the full tensor that it is a view of."""
        base = self._base
        if type(base) is not DTensor or self.spec.coordinate is None:
            return 0
        offset, source, full = int(self.part.storage_offset()), base.part, base.spec.meta.stride
        if not have_one_memory(self.part, source):  # the source was redistributed for the view
            source, full = self.part, self.spec.meta.stride
        else:
            offset -= int(source.storage_offset())
        strides: list[tuple[int, int]] = [*zip(map(int, source.stride()), full, strict=True)]
        found = 0
        for local_stride, full_stride in sorted(strides, reverse=True):
            if local_stride:
                found += offset // local_stride * full_stride
                offset %= local_stride
        return found + offset

    def _read_data(self) -> torch.Tensor:
        """The tensor without autograd; assigning a DTensor replaces this one's part and spec."""
        made = _data.__get__(self)
        if self.copied_at is not None:
            made.copied_at = made._version  # its version counter is a new one
        return made

    def _set_data(self, value: torch.Tensor) -> None:
        if type(value) is not DTensor:
            raise UsageError(
                "the data of a DTensor must be a DTensor",
                op="DTensor.data",
                seen=f"{type(value).__name__} {list(value.shape)}",
                fix="Use distribute_tensor(), or copy into the part: to_local().copy_().",
            )
        dispatch.check_copy("DTensor.data", value, writes=True)
        _data.__set__(self, value)
        self.part, self.spec, self.copied_at = value.part, value.spec, None

    data = property(_read_data, _set_data)  # pyright: ignore

    @untraced_below
    def _read_grad(self) -> torch.Tensor | None:
        """The gradient; if autograd left it Partial, it is reduced when it is first read.

        Collective:
            The first read after backward, if the gradient is Partial: all ranks of the mesh. If
            only some ranks read it, or ranks read it of different parameters, `Desync` names the
            lines.
        """
        grad = _get_grad(self)
        if grad is not None and type(grad) is not DTensor:
            grad = divided_gradient(grad, self.spec)
            _grad.__set__(self, grad)
        copied = type(grad) is DTensor and grad.copied_at is not None  # a gradient is not a view
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
        """Return a view or a selection; lists of numbers and ranges are replicated indices."""
        return _get_item(self, index_on(self.spec.mesh, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index_on(self.spec.mesh, index), value)

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Register a backward hook, as `torch.Tensor.register_hook`.

        The hook belongs to the program: plain tensors among DTensors are refused in it.
        """

        @functools.wraps(hook)
        def run(grad: torch.Tensor) -> Any:
            with state.within_hook():
                return hook(grad)

        return super().register_hook(run)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Return this rank's part, the mesh and the placements, without communication.

        A single rank may print a tensor; ``full_tensor()`` returns all values.
        """
        return (
            f"DTensor(local_tensor={self.part}, device_mesh={self.spec.mesh!r}, "
            f"placements={self.spec.placements})"
        )

    def __str__(self) -> str:
        """Return the same as `repr`; raise if this is an outdated copy of a view."""
        dispatch.check_copy("print", self)
        return repr(self)

    def __format__(self, spec: str) -> str:
        """Format a tensor without dimensions as a number (a collective), others as `repr`."""
        return format(self.item(), spec) if self.ndim == 0 else format(str(self), spec)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the part for torch's tools; make a compiler run functions of DTensors uncompiled.

        Tracing would call collectives on tensors without values.
        """
        if torch_private.TracingContext.try_get() is not None:
            raise torch_private.later("torch._dynamo.exc.Unsupported")(
                "Dure's DTensors cannot be traced: this function runs uncompiled"
            )
        return ["part"], (self.spec, self.requires_grad)

    def __create_write_items__(self, fqn: str, value: object) -> NoReturn:
        """Refuse torch's checkpoints: each rank would save its part as if it were the full tensor.

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
            raise RuntimeError("deepcopy supports only leaf tensors, got the result of an operator")
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
        "torch.distributed.checkpoint cannot save or load DTensors of dure",
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
    """Return the classes that `torch.load(weights_only=True)` needs to load DTensors and meshes.

    Importing `dure.tensor` registers them. After `torch.serialization.clear_safe_globals()`, call
    ``torch.serialization.add_safe_globals(dure.tensor.safe_globals())``.

    Returns:
        Classes and functions, for `torch.serialization.add_safe_globals`.

    Example:
        ```python
        from dure import tensor

        torch.serialization.add_safe_globals(tensor.safe_globals())
        assert tensor.Shard in tensor.safe_globals()
        ```
    """
    return [
        _rebuild, spec_of, restore_mesh, TensorMeta,
        Partial, Replicate, Shard, StridedShard, MaskPartial,
    ]  # fmt: skip


def _check_grads_of_terms(spec: DTensorSpec, grads: Sequence[Placement]) -> None:
    """Raise if the gradient depends on the terms and `grads` would not reduce it first."""
    if needs_terms(spec) and any(
        here.is_partial() and not there.is_replicate()
        for here, there in zip(spec.placements, grads, strict=True)
    ):
        raise PlacementError(
            "grad_placements must be Replicate() where the tensor is Partial(max, min or product)",
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
def _full_meta(
    local_shape: torch.Size,
    local_stride: tuple[int, ...],
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> TensorMeta:
    """Return shape, strides and dtype of the full tensor if all parts are like this one.

    Dimensions keep their order in the part's memory, and the gaps.

    Args:
        local_shape, local_stride, dtype: Those of the part.
        sizes: Size of each axis of the mesh.
        placements: One for each axis of the mesh.
    """
    shape = list(local_shape)
    for size, placement in zip(sizes, placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= size
    stride, factor, end = [0] * len(shape), 1, 1
    for dim in sorted(range(len(shape)), key=lambda d: (local_stride[d], -d)):
        # The stride of a dimension of one element has no meaning.
        stride[dim] = local_stride[dim] * factor if local_shape[dim] > 1 else end
        if stride[dim] and local_shape[dim]:
            factor *= shape[dim] // local_shape[dim]
            end = stride[dim] * shape[dim]
    return TensorMeta(torch.Size(shape), tuple(stride), dtype)


wrapping.bind(DTensor)
dispatch.bind(DTensor)
