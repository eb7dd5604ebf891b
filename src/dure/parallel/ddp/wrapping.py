"""What of a module is wrapped: the parameters to average, the buffers to send, the devices.

All of it is found out before anything is communicated, so that a module that cannot be wrapped is
refused with its reason, on this rank, at this line.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.errors import ModuleError
from dure.parallel.ddp.buckets import NamedParameter

__all__ = ["buffer_owners", "checked_device_ids", "trained_parameters"]


def trained_parameters(module: torch.nn.Module, ignored: set[str]) -> list[NamedParameter]:
    """Return the parameters whose gradients are averaged, in the order of registration."""
    found = [
        NamedParameter(name=name, parameter=p)
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
