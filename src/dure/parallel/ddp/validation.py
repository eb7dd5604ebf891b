"""What can be wrapped, and what the arguments of `DistributedDataParallel` mean.

All of it is found out before anything is communicated, so that a module that cannot be wrapped is
refused with its reason, on this rank, at this line: which parameters are averaged, which buffers
are sent, which devices they are on.

Torch's class has grown arguments over the years that overlap, or that work around its own limits.
Those that make sense here are accepted with torch's meaning; a program that relies on another is
warned when it wraps its module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from dure.comm.group import ProcessGroup
from dure.comm.world import resolve
from dure.errors import ModuleError, warn_deprecated
from dure.parallel.ddp.buckets import FIRST_CAP_BYTES
from dure.parallel.ddp.outcome import shown
from dure.training.autograd_hooks import on_outputs
from dure.training.grad_views import GradView, NamedParameter

__all__ = [
    "BucketCaps",
    "BufferRules",
    "WrappedParameters",
    "buffer_owners",
    "buffer_rules",
    "checked_device_ids",
    "chosen_group",
    "refuse_delayed",
    "refuse_foreign_batch_norm",
    "refuse_wrapped",
    "trained_parameters",
]

_DEFAULT_CAP_MB = 25.0
_MIB = 1 << 20
_needs_gradient = attrgetter("requires_grad")


@dataclass(frozen=True, slots=True)
class BucketCaps:
    """How large buckets are.

    Attributes:
        usual: Bytes at which a bucket is closed.
        listed: The same for the first, the second, ... bucket, as the user gave it; else empty.
        first: Bytes at which the first bucket is closed.
    """

    usual: int
    listed: tuple[int, ...]
    first: int

    @staticmethod
    def of(cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> BucketCaps:
        """Take over `bucket_cap_mb` and `bucket_cap_mb_list`; the list wins."""
        given = [*(cap_mb_list or ()), *(() if cap_mb is None else (cap_mb,))]
        if any(not cap > 0 for cap in given):
            raise ModuleError(
                "a bucket must be allowed some bytes",
                seen=f"bucket_cap_mb={cap_mb}, bucket_cap_mb_list={cap_mb_list}",
                fix="Give sizes in MiB, or leave them out for 25.",
            )
        if cap_mb_list:
            listed = tuple(int(cap * _MIB) for cap in cap_mb_list)
            return BucketCaps(max(listed), listed, listed[0])
        usual = int((_DEFAULT_CAP_MB if cap_mb is None else cap_mb) * _MIB)
        return BucketCaps(usual, (), usual if cap_mb else FIRST_CAP_BYTES)

    @property
    def all(self) -> tuple[int, ...]:
        """The caps as the planner takes them."""
        return self.listed or (self.first, self.usual)


@dataclass(frozen=True, slots=True)
class BufferRules:
    """When buffers are sent: before forwards, and when the module is wrapped."""

    in_forward: bool
    at_first: bool


def buffer_rules(broadcast_buffers: bool | None, forward_sync: bool | None) -> BufferRules:
    """Take over `broadcast_buffers` and `forward_sync_buffers`, which replaces it."""
    if broadcast_buffers is not None:
        warn_deprecated(
            "`broadcast_buffers`",
            "`forward_sync_buffers`, which decides if both are given, and leaves the buffers of a "
            "newly wrapped module to `init_sync`",
            stacklevel=3,
        )
    if forward_sync is not None:
        return BufferRules(forward_sync, True)
    return BufferRules(broadcast_buffers is not False, broadcast_buffers is not False)


def chosen_group(group: ProcessGroup | None, device_mesh: Any) -> ProcessGroup:
    """Return the group that averages: `group`, or that of a mesh of one axis."""
    if device_mesh is None:
        return resolve(group, "DistributedDataParallel")
    if group is not None:
        raise ModuleError(
            "process_group and device_mesh exclude each other",
            fix="Give the one that has the ranks which average their gradients.",
        )
    found = device_mesh.get_group() if getattr(device_mesh, "ndim", None) == 1 else None
    if not isinstance(found, ProcessGroup):
        raise ModuleError(
            "a device_mesh must have one axis, and a group of Dure's",
            seen=f"{device_mesh!r}",
            fix="Pass the axis' group as process_group.",
        )
    return found


def refuse_delayed(named: object, hooked: torch.Tensor | None) -> None:
    """Refuse the arguments by which torch's DDP leaves parameters to a hook of another one."""
    if named is not None or hooked is not None:
        raise ModuleError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce are not supported",
            seen="they reduce gradients that are added to several times in a backward",
            fix="Leave them out, and pass static_graph=True: such gradients are counted.",
        )


def refuse_wrapped(module: torch.nn.Module, ignored: set[str]) -> None:
    """Refuse a module whose gradients a wrapper inside it averages already, unless ignored here."""
    for path, inner in module.named_modules():
        if not isinstance(getattr(inner, "require_backward_grad_sync", None), bool):
            continue
        prefix = f"{path}." if path else ""
        twice = [n for n, _ in inner.named_parameters(prefix=path) if n not in ignored]
        if twice:
            raise ModuleError(
                "the module is wrapped already",
                parameters=tuple(twice),
                seen=f"{path or 'it'} is a {type(inner).__name__}, which averages its gradients",
                fix=f"Wrap the outer module once, or have {prefix}* ignored "
                "(_set_params_and_buffers_to_ignore_for_model)."
                if path
                else "Wrap it once; to wrap it again, wrap ddp.module.",
            )


def refuse_divided(trained: Sequence[NamedParameter], group: ProcessGroup) -> None:
    """Refuse parameters that are cut among ranks of the group: each has something else of them."""
    members = set(group.global_ranks)
    cut: list[str] = []
    for name, tensor in ((p.name, p.parameter) for p in trained):
        for axis, placement in enumerate(getattr(tensor, "placements", ())):  # of a DTensor
            peers = tensor.device_mesh.get_group(axis).global_ranks  # pyright: ignore
            if placement.is_shard() and len(members.intersection(peers)) > 1:
                cut.append(name)
                break
    if cut:
        raise ModuleError(
            "parameters are divided among the ranks that would average them",
            parameters=tuple(cut),
            seen=", ".join(cut),
            fix="Pass the mesh of other axes; or leave them out, as experts that are divided "
            "over data-parallel ranks (_set_params_and_buffers_to_ignore_for_model).",
        )


def refuse_foreign_batch_norm(module: torch.nn.Module) -> None:
    """Refuse torch's `SyncBatchNorm`: it knows no groups of Dure's, and would not synchronise."""
    paths = [p for p, m in module.named_modules() if isinstance(m, torch.nn.SyncBatchNorm)]
    if paths:
        raise ModuleError(
            "torch.nn.SyncBatchNorm would normalise over each rank's own batch, without a word",
            seen=f"the path is {shown(paths)}",
            fix="Convert the module: dure.SyncBatchNorm.convert_sync_batchnorm(module).",
        )


def trained_parameters(module: torch.nn.Module, ignored: set[str]) -> list[NamedParameter]:
    """Return the parameters whose gradients are averaged, in the order of registration."""
    sparse = _sparse_parameters(module)
    found = [
        NamedParameter(name=name, parameter=p, sparse=p in sparse)
        for name, p in module.named_parameters()
        if p.requires_grad and name not in ignored
    ]
    if not found:
        raise ModuleError(
            "the module has no parameter that needs a gradient",
            seen=f"a {type(module).__name__} with "
            f"{sum(1 for _ in module.parameters())} parameters, all frozen or ignored",
            fix="Call it without DistributedDataParallel.",
        )
    lazy = [p.name for p in found if isinstance(p.parameter, torch.nn.UninitializedParameter)]
    if lazy:
        raise ModuleError(
            "the module has parameters without a shape",
            parameters=tuple(lazy),
            seen=", ".join(lazy),
            fix="Run one forward with a sample batch before wrapping it.",
        )
    return found


def _sparse_parameters(module: torch.nn.Module) -> set[torch.Tensor]:
    """Find the weights of embeddings with ``sparse=True``: their gradients have only some rows."""
    embeddings = (
        m
        for m in module.modules()
        if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag) and m.sparse
    )
    return {m.weight for m in embeddings}


def checked_device_ids(
    device_ids: Sequence[int | torch.device] | None, trained: Sequence[NamedParameter]
) -> list[int | torch.device] | None:
    """Return `device_ids` after a check against where the module is."""
    if not device_ids:
        return None
    devices = {p.parameter.device for p in trained}
    kinds = sorted({d.type for d in devices})
    if len(device_ids) == 1 and len(devices) == 1 and kinds != ["cpu"]:
        return list(device_ids)
    raise ModuleError(
        "device_ids does not fit the module",
        seen=f"device_ids={list(device_ids)}, but the parameters are on "
        + ", ".join(sorted(map(str, devices))),
        fix="Leave device_ids out on the CPU and for a module on several devices; otherwise give "
        "the one device that the module was moved to.",
    )


def buffer_owners(
    module: torch.nn.Module, ignored: set[str]
) -> dict[str, tuple[torch.nn.Module, str]]:
    """Find, for each buffer's path, the submodule it belongs to and its name there."""
    owners: dict[str, tuple[torch.nn.Module, str]] = {}
    seen: set[torch.Tensor] = set()
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            path = f"{prefix}.{name}" if prefix else name
            if buffer not in seen and path not in ignored:
                seen.add(buffer)
                owners[path] = (submodule, name)
    return owners


class WrappedParameters:
    """Tells whether the parameters of a module are still those that it was wrapped with.

    *Replaced.* `torch.func.functional_call` puts other tensors in their places for one forward: its
    gradients are the caller's, and nothing is to be averaged. A program that replaces parameters
    for good has their gradients averaged no more, which is a mistake, and raises: at once if the
    first is among several that were replaced, else in backward, since by then the originals would
    be back.

    *Unfrozen.* Nothing averages parameters that needed no gradient at wrapping and need one now, so
    that the replicas would drift apart.

    Cost:
        One look at the first parameter's place, at all of them only if that has another tensor; and
        one at each parameter that was frozen.
    """

    def __init__(
        self, module: torch.nn.Module, trained: Sequence[NamedParameter], ignored: set[str]
    ) -> None:
        self._module, self._trained = module, trained
        path, _, self._name = trained[0].name.rpartition(".")
        owner = module.get_submodule(path)
        self._place: dict[str, torch.Tensor | None] = vars(owner)["_parameters"]
        self._first = trained[0].parameter
        self._frozen = {
            p: name
            for name, p in module.named_parameters()
            if not p.requires_grad and name not in ignored
        }

    def all_replaced(self) -> bool:
        """Return whether all parameters are others.

        Raises:
            ModuleError: Only some are.
        """
        if self._place.get(self._name) is self._first:
            return False
        now = dict(self._module.named_parameters(remove_duplicate=False))
        names = [p.name for p in self._trained if now.get(p.name) is not p.parameter]
        if len(names) < len(self._trained):
            raise _replaced(names)
        return True

    def is_replaced(self, named: NamedParameter | GradView) -> bool:
        """Return whether the module does not have a parameter any more."""
        path, _, name = named.name.rpartition(".")
        try:
            found = self._module.get_submodule(path)._parameters.get(name)  # pyright: ignore
        except AttributeError:  # the submodule is gone
            found = None
        # It may have another path: `torch.nn.utils.parametrize` moves it.
        return found is not named.parameter and not any(
            p is named.parameter for p in self._module.parameters()
        )

    def refuse_for_good(self, outputs: object) -> None:
        """Have the backward of `outputs` raise `ModuleError` if the originals are not back."""

        def check(_: object) -> None:
            if self._place.get(self._name) is not self._first:
                raise _replaced([p.name for p in self._trained])

        on_outputs(outputs, check)

    def refuse_unfrozen(self) -> None:
        """Raise `ModuleError` if a parameter that was frozen needs a gradient now."""
        if not any(map(_needs_gradient, self._frozen)):
            return
        names = [name for p, name in self._frozen.items() if p.requires_grad]
        raise ModuleError(
            "parameters were unfrozen after the module was wrapped",
            parameters=tuple(names),
            seen=shown(names) + ": their gradients would not be averaged",
            fix="Wrap the module again after the change: DistributedDataParallel(ddp.module).",
        )


def _replaced(names: Sequence[str]) -> ModuleError:
    return ModuleError(
        "parameters were replaced after the module was wrapped",
        parameters=tuple(names),
        seen=shown(names),
        fix="Wrap the module after all changes to it, or change the parameters' values in place.",
    )
