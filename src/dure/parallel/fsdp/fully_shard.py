"""`fully_shard`: checks of its arguments, the parameters of a call, and their groups.

A call takes the parameters of its modules that no call on a module within has taken, and that are
not ignored. They are sharded in place: the module gets parameters that are DTensors, and the class
`FSDP<Class>`, which has the methods of `FSDPModule` (module.py). A parameter that several modules
have (tied) belongs to the call on a module that has all of them within.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from dure.errors import DeviceError, MeshError, ModuleError, UsageError
from dure.mesh import DeviceMesh
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.choosing import forced
from dure.parallel.fsdp.extensions import is_extended
from dure.parallel.fsdp.group import ParameterGroup
from dure.parallel.fsdp.hooks import ModuleHooks
from dure.parallel.fsdp.host_memory import HostMemory, host_memory_of
from dure.parallel.fsdp.module import FSDPModule
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.policies import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from dure.parallel.fsdp.reducing import Reduction
from dure.parallel.fsdp.state import FSDPState, state_of
from dure.tensor.placement_types import Shard
from dure.training.grad_views import own_part
from dure.training.in_place import check_plain, give_methods
from dure.training.mapped_files import Files
from dure.training.optimizers import note_replaced

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["fully_shard", "register_fsdp_forward_method"]

_OP = "fully_shard"
Taken = tuple[FSDPState, FSDPParameter]


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
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

    Call it on submodules first (each block of a transformer), then on the model. Make the optimizer
    afterwards. Forward and backward then run as before; gradients are averages over the ranks.

    Args:
        module: The module, or a list of modules whose parameters are gathered together.
        mesh: One axis, over which parameters are sharded; or two, replicas and shards. All ranks
            where None.
        reshard_after_forward: Free the unsharded parameters between forward and backward. None:
            yes, except for the root. A number of ranks, which divides that of the shard axis: keep
            them divided over so many neighbours, which gather them for backward between them. Where
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
        Parameters, gradients and optimizer state: 1/n of their memory on each of n ranks. Each
        step sends the gradients once, and gathers the parameters up to twice; on one host it
        gathers nothing, because its ranks share the parameters' memory.

    Example:
        ```python
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        for layer in model:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert model[0].weight.to_local().shape == (4, 8)  # on 2 ranks
        ```
    """
    given = cast("Sequence[nn.Module]", module if isinstance(module, list | tuple) else [module])
    modules = tuple(dict.fromkeys(given))
    _check_modules(modules)
    first = next((p for m in modules for p in m.parameters()), None)
    kind = "cpu" if first is None else first.device.type
    axes = DataAxes.of(mesh, dp_mesh_dims, kind)
    policy = mp_policy or MixedPrecisionPolicy()
    post_forward_group, frees = _after_forward(reshard_after_forward, axes)
    path = offload_policy.path if offload_policy is not None else None
    files = None if path is None else Files(path)
    found = _parameters(modules, ignored_params or set())
    host = host_memory_of(offload_policy, axes)
    dims = {p: _dim(p, places, axes, shard_placement_fn, host) for p, places in found.items()}
    made = {p: FSDPParameter(p, found[p], dims[p], axes, policy, files, host) for p in found}
    groups = _groups(made.values(), axes, policy, post_forward_group)
    state = FSDPState(modules, groups, policy, frees)
    ModuleHooks(state)
    for parameter, one in made.items():
        one.to_sharded(keeps_assigned=False)
        note_replaced(parameter, one.now)
        parameter._dure_fsdp = state, one  # pyright: ignore
    for each in modules:
        give_methods(each, FSDPModule)
    return module


def _groups(
    parameters: Iterable[FSDPParameter],
    axes: DataAxes,
    policy: MixedPrecisionPolicy,
    post_forward_group: ProcessGroup | None,
) -> list[ParameterGroup]:
    """Return groups of parameters with the same dtype and kind."""
    kinds: dict[tuple[torch.dtype, bool, bool], list[FSDPParameter]] = {}
    for one in parameters:
        kind = one.dtype, one.is_trained, is_extended(one.part)
        kinds.setdefault(kind, []).append(one)
    return [
        ParameterGroup(
            parameters=group,
            reduction=Reduction(group, axes, policy.reduce_dtype),
            requested=forced(),
            post_forward_group=post_forward_group,
        )
        for group in kinds.values()
    ]


def _after_forward(
    requested: bool | int | None, axes: DataAxes
) -> tuple[ProcessGroup | None, bool | None]:
    """Return the ranks that keep parts until backward, and whether each rank reshards."""
    if requested is None or isinstance(requested, bool):
        return None, requested
    if not 1 <= requested <= axes.size or axes.size % requested:
        raise MeshError(
            "reshard_after_forward is a number of ranks that divides the shard axis",
            op=_OP,
            seen=f"{requested} of {axes.size} ranks",
        )
    if requested in (1, axes.size):
        return None, requested > 1
    return axes.intra_and_inter_node(requested)[0], True


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise UsageError("fully_shard takes a module, or some in a list", op=_OP, seen="[]")
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
    check_plain(modules, _OP)


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
    state, mine = taken
    group = next(group for group in state.groups if mine in group.parameters)
    group.parameters.remove(mine)
    if group.parameters:
        group.rebuild_strategy()
    else:
        state.groups.remove(group)
    for owner, name in mine.places:
        owner._parameters[name] = parameter  # pyright: ignore[reportPrivateUsage]
    return mine.places


def _dim(
    parameter: nn.Parameter,
    places: list[tuple[nn.Module, str]],
    axes: DataAxes,
    choose: Callable[[nn.Parameter], Shard | None] | None,
    host: HostMemory | None = None,
) -> int:
    """Check a parameter; return the dimension to cut."""
    name = f"{type(places[0][0]).__name__}.{places[0][1]}"
    local = own_part(parameter)
    if not local.is_contiguous():
        raise ModuleError(
            "only contiguous parameters are sharded",
            op=_OP,
            parameters=(name,),
            seen=f"strides {local.stride()} of {list(local.shape)}",
            fix="Assign parameter.data = parameter.data.contiguous() first.",
        )
    allowed = {axes.mesh.device_type, "meta"} | ({"cpu"} if host is not None else set())
    if local.device.type not in allowed:
        raise DeviceError(
            "a parameter is on another device than the mesh",
            op=_OP,
            seen=f"{name} on {local.device}, {axes.mesh!r}",
        )
    if parameter.ndim == 0:
        raise ModuleError(
            "a parameter without dimensions cannot be sharded",
            op=_OP,
            parameters=(name,),
            fix="Give it the shape [1], or name it in ignored_params.",
        )
    placement = choose(parameter) if choose is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard) or not -parameter.ndim <= placement.dim < parameter.ndim:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModuleError(
            "shard_placement_fn returns Shard(dim) of a dimension that there is, or None",
            op=_OP,
            parameters=(name,),
            seen=f"{placement!r} for {list(parameter.shape)}",
        )
    return placement.dim % parameter.ndim


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method gather and free parameters as forward does, such as ``generate``.

    Args:
        module: A sharded module; nothing is done for any other.
        method_name: The method.

    Raises:
        UsageError: There is no such method.

    Example:
        ```python
        class Doubling(torch.nn.Linear):
            def doubled(self, x):
                return 2 * self(x)

        model = fsdp.fully_shard(Doubling(4, 4))
        fsdp.register_fsdp_forward_method(model, "doubled")
        assert model.doubled(torch.ones(1, 4)).shape == (1, 4)
        ```
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
        return state.hooks.run(module, method, args, kwargs)

    setattr(module, method_name, run)
