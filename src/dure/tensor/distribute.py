"""From a tensor of the whole shape, or a module, to DTensors.

`distribute_tensor` takes the values of the first rank along each axis: it scatters or broadcasts
along one axis after another, so in the end all values are those of the mesh's first rank.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from dure.comm.call import NOTHING, about
from dure.comm.differentiable import Map
from dure.comm.untraced import untraced_below
from dure.errors import MeshError, ModuleError, PlacementError, UsageError
from dure.mesh import DeviceMesh
from dure.tensor.dtensor import DTensor, mesh_or_current, wrap
from dure.tensor.placement_types import Placement, Replicate
from dure.tensor.redistribute import parts_along, pieces_of, way_of
from dure.tensor.spec import DTensorSpec, TensorMeta, as_placements, spec_of

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
    """Make a DTensor of a tensor of the whole shape.

    Args:
        tensor: A leaf of the whole shape, on every rank; the source's values count. A Parameter
            stays one, and a leaf keeps its ``requires_grad``. On the meta device nothing is sent.
        device_mesh: The mesh; that of ``with mesh:`` where None.
        placements: `Shard` or `Replicate` for each axis; replicated where None.
        src_data_rank: Which rank along each axis has the values. None: every rank has them, and
            keeps its part without communication.

    Returns:
        The DTensor. A whole part may share memory with `tensor`, as in torch; a cut one does not.

    Raises:
        PlacementError: `Partial`; placements that do not fit; a DTensor of other placements.
        MeshError: No mesh; a DTensor of another mesh.
        UsageError: The tensor is a result of autograd; there is no such source.
        Desync: Ranks gave different shapes, dtypes or placements.

    Collective:
        All ranks of the mesh; none with ``src_data_rank=None``.

    Cost:
        One scatter or broadcast an axis.
    """
    op = "distribute_tensor"
    mesh = mesh_or_current(device_mesh, op)
    if isinstance(tensor, DTensor):
        return _unchanged(tensor, mesh, placements)
    given = as_placements(placements, mesh, tensor.ndim, op)
    if any(p.is_partial() for p in given):
        raise PlacementError(
            "a whole tensor is not distributed as terms",
            op=op,
            seen=f"{given}",
            fix="Use Replicate(), or DTensor.from_local with Partial() for terms that ranks have.",
        )
    if not tensor.is_leaf:
        raise UsageError(
            "distribute_tensor takes a leaf: the gradient would end here",
            op=op,
            seen=f"{list(tensor.shape)}, the result of {tensor.grad_fn}",
            fix="detach() it; or use DTensor.from_local(...).redistribute(...), which autograd "
            "goes through.",
        )
    sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
    if src_data_rank is not None and not 0 <= src_data_rank < min(sizes):
        raise UsageError(
            "src_data_rank is a rank of every axis", op=op, seen=f"{src_data_rank} in {mesh!r}"
        )
    local = tensor.detach()
    if not local.is_meta and local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    spec = spec_of(mesh, given, TensorMeta.of(tensor))
    if spec.coordinate is None:
        local = local.new_empty(0)
    else:
        about(way_of(spec, spec).subject)
        try:
            local = _received(local, spec, None if local.is_meta else src_data_rank)
        finally:
            about(NOTHING)
    if not (tensor.is_contiguous() or (src_data_rank is None and spec.is_replicated())):
        # Parts that were received or cut are row-major, whatever the tensor was.
        local = local.contiguous()
        stride = torch.empty(tensor.shape, device="meta").stride()
        spec = spec_of(mesh, given, TensorMeta(tensor.shape, stride, tensor.dtype))
    made = wrap(local, spec)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)  # pyright: ignore[reportReturnType]
    return made.requires_grad_(tensor.requires_grad)  # pyright: ignore[reportReturnType]


def _unchanged(
    tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement] | None
) -> DTensor:
    if tensor.device_mesh != mesh:
        raise MeshError(
            "a DTensor stays on its mesh",
            op="distribute_tensor",
            seen=f"{tensor.device_mesh!r}, asked for {mesh!r}",
        )
    if as_placements(placements, mesh, tensor.ndim, "distribute_tensor") != tensor.placements:
        raise PlacementError(
            "the tensor is distributed already, in another way",
            op="distribute_tensor",
            seen=f"{tensor.placements}, asked for {placements}",
            fix="Call redistribute().",
        )
    return tensor


def _received(local: torch.Tensor, spec: DTensorSpec, source: int | None) -> torch.Tensor:
    """Return this rank's part: first cut along the axes that cut, in their order, then copied."""
    mesh = spec.mesh
    for dim in range(spec.ndim):
        for cut in spec.cuts(dim):
            n, index = mesh.size(cut.axis), mesh.get_local_rank(cut.axis)
            runs = parts_along(local.shape[dim], cut, n)
            if source is None:
                local = torch.cat(pieces_of(local, dim, runs[index]), dim)
                continue
            what = Map(mesh.get_group(cut.axis))
            shape = list(local.shape)
            shape[dim] = sum(length for length, _ in runs[index])
            part = what.allocate(local, shape)
            if cut.runs == 1 and local.shape[dim] == n * shape[dim]:
                what.group.scatter_along(part, local, dim, source)
            else:
                parts = None
                if index == source:
                    pieces = [pieces_of(local, dim, one) for one in runs]
                    parts = [p[0] if len(p) == 1 else torch.cat(p, dim) for p in pieces]
                what.group.scatter(part, parts, source)
            local = part
    if source is not None:
        for axis, placement in enumerate(spec.placements):
            if placement.is_replicate():
                what = Map(mesh.get_group(axis))
                own = mesh.get_local_rank(axis) == source
                local = local.contiguous() if own else what.allocate(local)
                what.group.broadcast(local, source)
    return local


# ---- modules -------------------------------------------------------------------------------------


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Make a module's parameters and buffers DTensors, in place.

    Args:
        module: The module.
        device_mesh: The mesh; that of ``with mesh:`` where None.
        partition_fn: Called with the name of each submodule, the submodule and the mesh; puts
            DTensors in the place of parameters and buffers as it likes. What it leaves, and all
            without it, is replicated; a parameter that two submodules share stays shared.
        input_fn: Called as ``input_fn(module, inputs, mesh)`` before forward; returns the inputs.
        output_fn: Called as ``output_fn(module, outputs, mesh)`` after forward; returns the
            outputs.

    Returns:
        `module`.

    Raises:
        ModuleError: It has been distributed before.
        UsageError: A function takes another number of arguments.

    Collective:
        All ranks of the mesh, as `distribute_tensor` for each parameter and buffer.
    """
    mesh = mesh_or_current(device_mesh, "distribute_module")
    if module in _distributed:
        raise ModuleError(
            "the module is distributed already",
            op="distribute_module",
            seen=type(module).__name__,
            fix="Call it once, on the outermost module.",
        )
    for name, fn in (("input_fn", input_fn), ("output_fn", output_fn)):
        if fn is not None and (count := len(inspect.signature(fn).parameters)) not in (2, 3):
            raise UsageError(
                f"{name} takes the module, what goes through it, and the mesh",
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
    if input_fn is not None:
        enter = _with_module(input_fn, "input_fn")
        module.register_forward_pre_hook(lambda mod, inputs: enter(mod, inputs, mesh))
    if output_fn is not None:
        leave = _with_module(output_fn, "output_fn")
        module.register_forward_hook(lambda mod, _, outputs: leave(mod, outputs, mesh))
    _distributed.add(module)
    return module


def share_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Let a parameter have the hooks of the one that it replaces, and handles remove them.

    Hooks of its gradient, and of its accumulated gradient.
    """
    source, target = cast(Any, old), cast(Any, new)
    if old is new:
        return
    if source._backward_hooks and not target._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks and not target._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def _replicate(module: nn.Module, mesh: DeviceMesh, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replicate what a module itself has and what is no DTensor yet."""
    whole = (Replicate(),) * mesh.ndim
    for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if isinstance(parameter, DTensor):
            continue
        if parameter not in made:
            made[parameter] = distribute_tensor(parameter, mesh, whole)  # pyright: ignore
        module.register_parameter(name, made[parameter])
    for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
        if not isinstance(buffer, DTensor):
            module._buffers[name] = distribute_tensor(buffer, mesh, whole)  # pyright: ignore


def _with_module(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that takes the module too, as torch once did not ask."""
    if len(inspect.signature(fn).parameters) == 3:
        return fn
    warnings.warn(
        f"{name} takes (module, {name.removesuffix('_fn')}s, mesh); the form without the module "
        "is torch's old one.",
        FutureWarning,
        stacklevel=3,
    )
    return lambda module, values, mesh: fn(values, mesh)
