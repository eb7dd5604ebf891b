"""What of a module is wrapped: the parameters to average, the buffers to send, the devices.

All of it is found out before anything is communicated, so that a module that cannot be wrapped is
refused with its reason, on this rank, at this line.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from dure.data.nests import tensors_of
from dure.errors import ModuleError
from dure.parallel.ddp.slots import NamedParameter

__all__ = [
    "Frozen",
    "Replaced",
    "buffer_owners",
    "checked_device_ids",
    "refuse_foreign_batch_norm",
    "refuse_wrapped",
    "shown",
    "trained_parameters",
]

_MAX_NAMES_SHOWN = 8
_needs_gradient = attrgetter("requires_grad")


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
                fix=f"Wrap the whole module once, or have {prefix}* ignored "
                "(_set_params_and_buffers_to_ignore_for_model)."
                if path
                else "Wrap it once; to wrap it anew, wrap ddp.module.",
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


class Replaced:
    """Tells whether a module computes with other tensors than the parameters it was wrapped with.

    `torch.func.functional_call` puts other tensors in their places for one forward: its gradients
    are the caller's, and nothing is to be averaged. A program that replaces parameters for good
    has their gradients averaged no more, which is a mistake, and is told so: at once where some
    were replaced, in backward where all were, since then the originals would be back.

    Cost: one look at the first parameter's place; at all of them only if that has another tensor.
    """

    def __init__(self, module: torch.nn.Module, trained: Sequence[NamedParameter]) -> None:
        self._module, self._trained = module, trained
        path, _, self._name = trained[0].name.rpartition(".")
        owner = module.get_submodule(path)
        self._place: dict[str, torch.Tensor | None] = vars(owner)["_parameters"]
        self._first = trained[0].parameter

    def all(self) -> bool:
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

    def refuse_for_good(self, outputs: object) -> None:
        """Have the backward of `outputs` raise `ModuleError` if the originals are not back."""

        def check(_: torch.Tensor) -> None:
            if self._place.get(self._name) is not self._first:
                raise _replaced([p.name for p in self._trained])

        for tensor in tensors_of(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(check)


def _replaced(names: Sequence[str]) -> ModuleError:
    return ModuleError(
        "parameters were replaced after the module was wrapped",
        parameters=tuple(names),
        seen=shown(names),
        fix="Wrap the module after all changes to it, or change the parameters' values in place.",
    )


class Frozen:
    """Tells whether parameters that needed no gradient at wrapping need one now.

    Nothing averages them, so the replicas would drift apart.

    Cost: one look at each parameter that was frozen; nothing where none was.
    """

    def __init__(self, module: torch.nn.Module, ignored: set[str]) -> None:
        self._named = {
            p: name
            for name, p in module.named_parameters()
            if not p.requires_grad and name not in ignored
        }

    def check(self) -> None:
        """Raise `ModuleError` if any was unfrozen."""
        if not any(map(_needs_gradient, self._named)):
            return
        names = [name for p, name in self._named.items() if p.requires_grad]
        raise ModuleError(
            "parameters were unfrozen after the module was wrapped",
            parameters=tuple(names),
            seen=shown(names) + ": their gradients would not be averaged",
            fix="Wrap the module again after the change: DistributedDataParallel(ddp.module).",
        )


def shown(names: Sequence[str]) -> str:
    """Return the first few of `names`, and how many more there are."""
    more = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
