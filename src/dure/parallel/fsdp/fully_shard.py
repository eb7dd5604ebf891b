"""`fully_shard`: what it is given, which parameters belong to a call, and what it makes of them.

A call takes the parameters of its modules that no call on a module within has taken, and that are
not ignored. They are sharded in place: the module gets parameters that are DTensors, and the class
`FSDP<Class>`, which has the methods of `FSDPModule` (module.py). A parameter that several modules
have (tied) belongs to the call on a module that has all of them within.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from dure.errors import DeviceError, MeshError, ModuleError, UsageError
from dure.mesh import DeviceMesh
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.choosing import strategy_for
from dure.parallel.fsdp.extensions import is_extended
from dure.parallel.fsdp.group import ParameterGroup
from dure.parallel.fsdp.module import FSDPModule
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.policies import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from dure.parallel.fsdp.state import FSDPState, state_of
from dure.parallel.fsdp.strategy import Reduction, forced
from dure.tensor.dtensor import DTensor
from dure.tensor.placement_types import Shard
from dure.training.mapped_files import Files

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]

_OP = "fully_shard"
Taken = tuple[FSDPState, ParameterGroup, FSDPParameter]
_classes: dict[type[nn.Module], type[nn.Module]] = {}


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of a module over the ranks that train it, in place.

    Call it on the parts first (each block of a transformer), then on the whole. Make the optimizer
    afterwards. Forward and backward then run as before; gradients are averages over the ranks.

    Args:
        module: The module, or a list of modules whose parameters are gathered together. Any: its
            type is what is returned.
        mesh: One axis, over which parameters are sharded; or two, replicas and shards. All ranks
            where None.
        reshard_after_forward: Free the whole parameters between forward and backward. None: yes,
            but for the root. A number of ranks, which divides that of the shard axis: keep them
            divided over so many neighbours, which gather them for backward between them. Where
            parameters are shared memory, it changes nothing.
        shard_placement_fn: Returns ``Shard(dim)`` for the dimension to cut; None for the first.
        mp_policy: Dtypes of computing and reducing.
        offload_policy: Where shards, gradients and optimizer state stay.
        ignored_params: Left alone.
        dp_mesh_dims: Which axes of a larger mesh are data parallel.

    Returns:
        `module`, whose class is now ``FSDP<Class>``, a subclass of its own and of `FSDPModule`.

    Raises:
        MeshError: A mesh that does not fit.
        ModuleError: A module that was given before, or has no forward; parameters that are not
            contiguous; DDP.
        DeviceError: Parameters on another device than the mesh's.

    Collective:
        All ranks of the mesh.

    Cost:
        Parameters: 1/n of their memory. A step: see the strategies.
    """
    modules = (
        tuple(cast("Sequence[nn.Module]", module))
        if isinstance(module, list | tuple)
        else (module,)
    )
    _check_modules(modules)
    axes = DataAxes.of(mesh, dp_mesh_dims)
    policy = mp_policy or MixedPrecisionPolicy()
    found = _parameters(modules, ignored_params or set())
    near, frees = _after_forward(reshard_after_forward, axes)
    path = offload_policy.path if offload_policy is not None else None
    files = None if path is None else Files(path)
    groups: dict[tuple[torch.dtype, bool, bool], list[FSDPParameter]] = {}
    originals: list[tuple[nn.Parameter, FSDPParameter]] = []
    for parameter, places in found.items():
        _check_parameter(parameter, places, axes)
        placement = shard_placement_fn(parameter) if shard_placement_fn is not None else None
        dim = _dim(placement, parameter, places)
        made = FSDPParameter(parameter, places, dim, axes, policy, files)
        made.show_sharded()
        kind = made.dtype, parameter.requires_grad, is_extended(made.part)
        groups.setdefault(kind, []).append(made)
        originals.append((parameter, made))
    reduction = Reduction(dtype=policy.reduce_dtype)
    make = partial(strategy_for, axes=axes, near=near, asked=forced())
    made_groups = [
        ParameterGroup(parameters=p, reduction=reduction, make=make, near=near)
        for p in groups.values()
    ]
    state = FSDPState(modules, made_groups, policy, frees)
    for parameter, made in originals:
        group = next(g for g in made_groups if made in g.parameters)
        parameter._dure_fsdp = state, group, made  # pyright: ignore
    for each in modules:
        each.__class__ = _sharded_class(type(each))
    return module


def _after_forward(
    asked: bool | int | None, axes: DataAxes
) -> tuple[ProcessGroup | None, bool | None]:
    """Return the ranks that keep wholes until backward, and whether each rank frees them."""
    if asked is None or isinstance(asked, bool):
        return None, asked
    if not 1 <= asked <= axes.size or axes.size % asked:
        raise MeshError(
            "reshard_after_forward is a number of ranks that divides the shard axis",
            op=_OP,
            seen=f"{asked} of {axes.size} ranks",
        )
    if asked in (1, axes.size):
        return None, asked > 1
    return axes.near_group(asked), True


def _check_modules(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if not isinstance(module, nn.Module):
            raise UsageError("fully_shard takes modules", op=_OP, seen=f"a {type(module).__name__}")
        if (
            isinstance(module, nn.ModuleList | nn.ModuleDict)
            and type(module).forward is nn.Module.forward
        ):
            raise ModuleError(
                "the module has no forward, around which its parameters could be gathered",
                op=_OP,
                seen=type(module).__name__,
                fix="Call fully_shard on each module in it, or on a list of them.",
            )
        if hasattr(module, "_dure_replica") or hasattr(module, "require_backward_grad_sync"):
            raise ModuleError(
                "the module is data parallel already", op=_OP, seen=type(module).__name__
            )
        if state_of(module) is not None:
            raise ModuleError(
                "the module is sharded already",
                op=_OP,
                seen=type(module).__name__,
                fix="Call fully_shard once on each module.",
            )


def _parameters(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return the parameters that belong to the call, and where they are.

    A tied parameter that an earlier call took goes back to where it was; it is taken here if all
    its places are within these modules, else by a later call.
    """
    within = {m for module in modules for m in module.modules()}
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in _managed(modules):
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter in ignored:
                continue
            places = found.setdefault(parameter, [])
            taken: Taken | None = vars(parameter).pop("_dure_fsdp", None)
            if taken is not None:
                places += _given_back(parameter, taken)
            places.append((owner, name))
    for inner in within:
        for parameter, places in inner.__dict__.pop("_dure_fsdp_tied", {}).items():
            known = found.setdefault(parameter, [])
            known += [place for place in places if place not in known]
    for parameter, places in list(found.items()):
        if any(owner not in within for owner, _ in places):
            for owner, _ in found.pop(parameter):
                owner.__dict__.setdefault("_dure_fsdp_tied", {})[parameter] = places
    return found


def _managed(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Go through the modules that no earlier call has."""
    seen: set[nn.Module] = set()
    waiting = list(reversed(modules))
    while waiting:
        module = waiting.pop()
        if module in seen or state_of(module) is not None:
            continue
        seen.add(module)
        yield module
        waiting += reversed(list(module.children()))


def _given_back(parameter: nn.Parameter, taken: Taken) -> list[tuple[nn.Module, str]]:
    """Take a tied parameter out of the group of an earlier call; return where it is."""
    state, group, mine = taken
    group.parameters.remove(mine)
    if group.parameters:
        group.remake()
    else:
        state.groups.remove(group)
    for owner, name in mine.places:
        owner._parameters[name] = parameter  # pyright: ignore[reportPrivateUsage]
    return mine.places


def _check_parameter(
    parameter: nn.Parameter, places: list[tuple[nn.Module, str]], axes: DataAxes
) -> None:
    name = f"{type(places[0][0]).__name__}.{places[0][1]}"
    local: Any = parameter.part if isinstance(parameter, DTensor) else parameter
    if not local.is_contiguous():
        raise ModuleError(
            "only contiguous parameters are sharded",
            op=_OP,
            parameters=(name,),
            seen=f"strides {local.stride()} of {list(local.shape)}",
            fix="Assign parameter.data = parameter.data.contiguous() first.",
        )
    if local.device.type not in (axes.mesh.device_type, "meta"):
        raise DeviceError(
            "a parameter is on another device than the mesh",
            op=_OP,
            seen=f"{name} on {local.device}, {axes.mesh!r}",
        )


def _dim(
    placement: Shard | None, parameter: nn.Parameter, places: list[tuple[nn.Module, str]]
) -> int:
    if parameter.ndim == 0:
        raise ModuleError(
            "a parameter without dimensions cannot be sharded",
            op=_OP,
            parameters=(places[0][1],),
            fix="Give it the shape [1], or name it in ignored_params.",
        )
    if placement is None:
        return 0
    if not isinstance(placement, Shard) or not -parameter.ndim <= placement.dim < parameter.ndim:
        raise ModuleError(
            "shard_placement_fn returns Shard(dim) of a dimension that there is, or None",
            op=_OP,
            parameters=(places[0][1],),
            seen=f"{placement!r} for {list(parameter.shape)}",
        )
    return placement.dim % parameter.ndim


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _no_copy})
    return _classes[cls]


def _no_copy(module: nn.Module, memo: object) -> nn.Module:
    raise ModuleError(
        "a sharded module cannot be copied",
        op="deepcopy",
        seen=type(module).__name__,
        fix="Copy the module before fully_shard, or its state_dict().",
    )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method gather and free parameters as forward does, such as ``generate``.

    Args:
        module: A sharded module; nothing is done for any other.
        method_name: The method.

    Raises:
        UsageError: There is no such method.
    """
    state = state_of(module)
    if state is None:
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise UsageError(
            "the module has no such method",
            op="register_fsdp_forward_method",
            seen=f"{method_name!r} of {type(module).__name__}",
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        return state.run(module, method, args, kwargs)

    setattr(module, method_name, run)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Accepted: roots share what they communicate with, the channels of their group, anyway.

    Args:
        modules: Sharded modules.

    Raises:
        UsageError: One is not.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                "the module is not sharded", op="share_comm_ctx", seen=type(module).__name__
            )
