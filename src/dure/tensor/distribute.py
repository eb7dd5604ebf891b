"""Create DTensors from full tensors and modules.

`distribute_tensor` uses the values of the first rank along each axis: it scatters or broadcasts
along one axis after another, so all values come from the first rank of the mesh.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import nn

from dure.comm.call import NOTHING, about
from dure.comm.capture import has_no_values
from dure.comm.differentiable import Map
from dure.comm.group import ProcessGroup
from dure.comm.untraced import untraced_below
from dure.errors import MeshError, ModuleError, PlacementError, UsageError, warn_deprecated
from dure.mesh import DeviceMesh
from dure.tensor.dtensor import DTensor, mesh_or_current
from dure.tensor.parameter_names import name_parameters
from dure.tensor.placement_types import Placement, Replicate
from dure.tensor.redistribute import (
    can_be_split,
    part_along,
    parts_along,
    pieces_of,
    plan_of,
    term_of,
)
from dure.tensor.spec import DTensorSpec, TensorMeta, as_placements, spec_of
from dure.tensor.wrapping import wrap

__all__ = ["distribute_module", "distribute_tensor", "share_hooks"]

_distributed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@untraced_below
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Create a DTensor from a full tensor.

    Args:
        tensor: A leaf tensor of the full shape, on every rank; only the values of the source rank
            are used. A Parameter stays a Parameter, and ``requires_grad`` is kept. On the meta
            device nothing is sent. For a wrapper subclass, its inner tensors are sent, and the
            subclass's own operators slice it.
        device_mesh: The mesh; if None, the one of the enclosing ``with mesh:`` block.
        placements: `Shard`, `Replicate` or `Partial` for each axis; if None, all are Replicate.
            With Partial("avg"), "max" and "min" every rank's term is the tensor itself. With
            Partial("sum") each rank gets an equal share if that is exact; otherwise the first rank
            along the axis gets the tensor and the others get zeros.
        src_data_rank: The rank along each axis whose values are used. If None, every rank has the
            values and keeps its part without communication.

    Returns:
        The DTensor. As in torch, a part that is not cut may share memory with `tensor`.

    Raises:
        PlacementError: Partial("product"), placements that do not fit, or a DTensor with other
            placements.
        MeshError: No mesh, or a DTensor of another mesh.
        UsageError: The tensor is the result of an operator that autograd recorded, `src_data_rank`
            is not a rank of every axis, or the tensor subclass has neither storage nor
            ``__tensor_flatten__``.
        Desync: Ranks passed different shapes, dtypes or placements.

    Collective:
        All ranks of the mesh; none with ``src_data_rank=None``.

    Cost:
        One scatter or broadcast per axis: the source sends, and another rank receives, at most the
        bytes of the tensor.

    Example:
        ```python
        from dure.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        weight = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
        assert weight.to_local().shape[0] == (2 if dist.get_rank() == 0 else 1)
        ```
    """
    mesh = mesh_or_current(device_mesh, "distribute_tensor")
    if isinstance(tensor, DTensor):
        return _unchanged(tensor, mesh, placements)
    given = _checked(tensor, mesh, placements, src_data_rank)
    local = tensor.detach()
    if not local.is_meta and local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    spec = spec_of(mesh, given, TensorMeta.of(tensor))
    if spec.coordinate is None:
        local = spec.part_outside()
    else:
        about(plan_of(spec, spec).subject)
        try:
            local = _received(local, spec, None if local.is_meta else src_data_rank)
        finally:
            about(NOTHING)
        for axis, placement in enumerate(given):
            if placement.is_partial():
                local = term_of(local, spec, axis)
    if not (tensor.is_contiguous() or (src_data_rank is None and spec.is_replicated())):
        # Parts that were received or cut are row-major, whether the tensor was or not.
        local = local.contiguous()
        stride = torch.empty(tensor.shape, device="meta").stride()
        spec = spec_of(mesh, given, TensorMeta(tensor.shape, stride, tensor.dtype))
    made = wrap(local, spec)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)  # pyright: ignore[reportReturnType]
    return made.requires_grad_(tensor.requires_grad)  # pyright: ignore[reportReturnType]


def _checked(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    source: int | None,
) -> tuple[Placement, ...]:
    """Check the arguments of `distribute_tensor`; return one placement for each axis."""
    op = "distribute_tensor"
    given = as_placements(placements, mesh, tensor.ndim, op, tensor.dtype)
    if any(p.is_partial() and not can_be_split(p, tensor.dtype) for p in given):
        raise PlacementError(
            "a tensor can be split into terms only for Partial(sum), max, min, and avg of floats",
            op=op,
            seen=f"{given} for {tensor.dtype}",
            fix="Use Replicate(), or DTensor.from_local with Partial() for terms that ranks have.",
        )
    if not tensor.is_leaf:
        raise UsageError(
            "the tensor must be a leaf: autograd does not go through distribute_tensor",
            op=op,
            seen=f"{list(tensor.shape)}, the result of {tensor.grad_fn}",
            fix="detach() it; or use DTensor.from_local(...).redistribute(...), which autograd "
            "goes through.",
        )
    if source is not None and not 0 <= source < min(mesh.shape):
        raise UsageError(
            "src_data_rank must be a rank of every axis", op=op, seen=f"{source} in {mesh!r}"
        )
    return given


def _shard_tensor(  # pyright: ignore[reportUnusedFunction]: a name of torch's
    full_tensor: torch.Tensor,
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None = None,
) -> DTensor:
    """Create a DTensor from a tensor that all ranks have, without communication."""
    return distribute_tensor(full_tensor, device_mesh, placements, src_data_rank=None)


def _unchanged(
    tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement] | None
) -> DTensor:
    if tensor.device_mesh != mesh:
        raise MeshError(
            "the tensor is already distributed on another mesh",
            op="distribute_tensor",
            seen=f"its mesh is {tensor.device_mesh!r}, device_mesh is {mesh!r}",
        )
    if as_placements(placements, mesh, tensor.ndim, "distribute_tensor") != tensor.placements:
        raise PlacementError(
            "the tensor is already distributed with other placements",
            op="distribute_tensor",
            seen=f"it has {tensor.placements}, placements is {placements}",
            fix="Call redistribute().",
        )
    return tensor


def _received(local: torch.Tensor, spec: DTensorSpec, source: int | None) -> torch.Tensor:
    """Return this rank's part: scatter along the axes that shard, then broadcast along others."""
    mesh = spec.mesh
    for dim in range(spec.ndim):
        for cut in spec.cuts(dim):
            n, index = mesh.size(cut.axis), mesh.get_local_rank(cut.axis)
            own = part_along(local.shape[dim], cut, n, index)
            if source is None:
                local = torch.cat(pieces_of(local, dim, own), dim)
                continue
            what = Map(mesh.get_group(cut.axis))
            if _is_made_of_others(local):
                runs = parts_along(local.shape[dim], cut, n)
                local = _scattered(local, dim, runs, index, what.group, source)
                continue
            shape = list(local.shape)
            shape[dim] = sum(length for length, _ in own)
            part = what.allocate(local, shape)
            if cut.runs == 1 and local.shape[dim] == n * shape[dim]:
                what.group.scatter_along(part, local, dim, source)
            else:
                parts = None
                if index == source:
                    runs = parts_along(local.shape[dim], cut, n)
                    pieces = [pieces_of(local, dim, one) for one in runs]
                    parts = [p[0] if len(p) == 1 else torch.cat(p, dim) for p in pieces]
                what.group.scatter(part, parts, source)
            local = part
    if source is not None:
        for axis, placement in enumerate(spec.placements):
            if not placement.is_shard():
                what = Map(mesh.get_group(axis))
                own = mesh.get_local_rank(axis) == source
                if _is_made_of_others(local):
                    local = local.clone(memory_format=torch.contiguous_format)
                    for one in _plain_tensors(local):
                        what.group.broadcast(one, source)
                    continue
                local = local.contiguous() if own else what.allocate(local)
                what.group.broadcast(local, source)
    return local


def _is_made_of_others(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a wrapper subclass, which has no memory.

    Raises:
        UsageError: It has no `__tensor_flatten__`, so its inner tensors are unknown.
    """
    if type(tensor) is torch.Tensor or has_no_values((tensor,)):
        return False
    with suppress(RuntimeError):  # the storage of a wrapper subclass has no pointer
        tensor.untyped_storage().data_ptr()
        return False
    if hasattr(tensor, "__tensor_flatten__"):
        return True
    raise UsageError(
        "the tensor subclass has neither storage nor `__tensor_flatten__`",
        op="distribute_tensor",
        seen=f"{type(tensor).__name__} {list(tensor.shape)}",
        fix="Define __tensor_flatten__, or pass src_data_rank=None, which sends nothing.",
    )


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory that a tensor is made of."""
    if not _is_made_of_others(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore
    return [plain for name in names for plain in _plain_tensors(getattr(tensor, name))]


def _scattered(
    local: torch.Tensor,
    dim: int,
    runs: Sequence[list[tuple[int, int]]],
    index: int,
    group: ProcessGroup,
    source: int,
) -> torch.Tensor:
    """Scatter a tensor of a wrapper subclass; return this rank's part.

    Args:
        local: On all ranks a tensor of the same subclass, whose parts give the shapes.
        dim: The dimension that is cut.
        runs: The runs of each rank, as (length, offset).
        index: This rank's number in the group.
        group: The ranks along the axis.
        source: The rank whose values are sent.
    """
    parts = [torch.cat(pieces_of(local, dim, one), dim) for one in runs]
    part = parts[index].clone(memory_format=torch.contiguous_format)
    given = [_plain_tensors(one) for one in parts]
    for number, plain in enumerate(_plain_tensors(part)):
        group.scatter(plain, [one[number] for one in given] if index == source else None, source)
    return part


# ---- modules -------------------------------------------------------------------------------------


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Replace a module's parameters and buffers by DTensors, in place.

    Args:
        module: The module, the same on all ranks.
        device_mesh: The mesh; if None, the one of the enclosing ``with mesh:`` block.
        partition_fn: Called as ``partition_fn(name, submodule, mesh)`` for each submodule; may
            replace parameters and buffers by DTensors. Those that it does not replace are
            replicated. A parameter that two submodules share stays shared.
        input_fn: Called as ``input_fn(module, inputs, mesh)`` before forward; returns the inputs.
        output_fn: Called as ``output_fn(module, outputs, mesh)`` after forward; returns the
            outputs.

    Returns:
        `module`.

    Raises:
        MeshError: No mesh.
        ModuleError: The module is already distributed.
        UsageError: `input_fn` or `output_fn` takes a wrong number of arguments.

    Collective:
        All ranks of the mesh, as `distribute_tensor` for each parameter and buffer.

    Cost:
        Those of `distribute_tensor` for each parameter and buffer.

    Example:
        ```python
        from dure.tensor import Replicate, distribute_module

        linear = distribute_module(torch.nn.Linear(3, 2), mesh)
        assert linear.weight.placements == (Replicate(),)
        ```
    """
    mesh = mesh_or_current(device_mesh, "distribute_module")
    if module in _distributed:
        raise ModuleError(
            "the module is already distributed",
            op="distribute_module",
            seen=type(module).__name__,
            fix="Call it once, on the outermost module.",
        )
    for name, fn in (("input_fn", input_fn), ("output_fn", output_fn)):
        if fn is not None and (count := len(inspect.signature(fn).parameters)) not in (2, 3):
            raise UsageError(
                f"{name} must take 3 arguments: the module, its inputs or outputs, and the mesh",
                op="distribute_module",
                seen=f"a function of {count} arguments",
            )
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, submodule in module.named_modules():
        before = dict(submodule.named_parameters(recurse=False, remove_duplicate=False))
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        _replicate(submodule, mesh, made)
        for path, parameter in before.items():
            now = getattr(submodule, path, None)
            if isinstance(now, DTensor):
                share_hooks(parameter, now)
    name_parameters(module)
    if input_fn is not None:
        enter = _with_module(input_fn, "input_fn")
        module.register_forward_pre_hook(lambda mod, inputs: enter(mod, inputs, mesh))
    if output_fn is not None:
        leave = _with_module(output_fn, "output_fn")
        module.register_forward_hook(lambda mod, _, outputs: leave(mod, outputs, mesh))
    _distributed.add(module)
    return module


def share_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give a parameter the hooks of the one that it replaces; their handles still remove them.

    Shared are the hooks of the gradient and of the accumulated gradient.
    """
    source, target = cast(Any, old), cast(Any, new)
    if old is new:
        return
    if source._backward_hooks and not target._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks and not target._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def _replicate(module: nn.Module, mesh: DeviceMesh, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replicate the module's own parameters and buffers that are not DTensors yet."""
    replicated = (Replicate(),) * mesh.ndim
    for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if isinstance(parameter, DTensor):
            continue
        if parameter not in made:
            made[parameter] = distribute_tensor(parameter, mesh, replicated)  # pyright: ignore
        module.register_parameter(name, made[parameter])
    for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
        if not isinstance(buffer, DTensor):
            module._buffers[name] = distribute_tensor(buffer, mesh, replicated)  # pyright: ignore


def _with_module(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that takes the module, too; torch's older signature was without it."""
    if len(inspect.signature(fn).parameters) == 3:
        return fn
    warn_deprecated(
        f"{name} without the module as its first argument",
        f"{name}(module, {name.removesuffix('_fn')}s, mesh)",
        stacklevel=3,
    )
    return lambda module, values, mesh: fn(values, mesh)
