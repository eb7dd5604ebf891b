"""Which devices a batch is split over.

On the CPU a "device" is a thread: naming the CPU n times, or giving the number n, makes n of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from dure.errors import ModuleError

__all__ = ["Device", "as_device", "as_devices", "chosen_devices", "home_of"]

Device = int | str | torch.device
_CPU = torch.device("cpu")


def home_of(module: torch.nn.Module) -> torch.device:
    """Return the device of the module's first parameter or buffer; the CPU if it has none."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return _CPU if first is None else first.device


def as_device(device: Device, kind: str) -> torch.device:
    """Read a device; a number is one of `kind`, and -1 the CPU."""
    if isinstance(device, int):
        return _CPU if device < 0 or kind == "cpu" else torch.device(kind, device)
    return torch.device(device)


def as_devices(devices: int | Sequence[Device], kind: str) -> list[torch.device]:
    """Read a list of devices, or a number of threads."""
    if isinstance(devices, int):
        return [_CPU] * devices
    return [as_device(d, kind) for d in devices]


def chosen_devices(
    module: torch.nn.Module, device_ids: int | Sequence[Device] | None
) -> list[torch.device]:
    """Return the devices to split batches over, the module's own first.

    Raises:
        ModuleError: The module is not on the first of them, or there is none.
    """
    home = home_of(module)
    if device_ids is None and home.type == "cpu":
        return [_CPU] * torch.get_num_threads()
    if device_ids is None:
        count = torch.get_device_module(home.type).device_count()
        others = [torch.device(home.type, i) for i in range(count)]
        return [home, *(d for d in others if d != home)]
    if home.type == "cpu" and torch.cuda.is_available() and _names_gpus(device_ids):
        raise _wrong_place(home, device_ids, "Move the module to the first of these GPUs.")
    devices = as_devices(device_ids, home.type)
    if not devices:
        raise _wrong_place(home, device_ids, "Name at least one device, or leave device_ids out.")
    if devices[0] != home or len({d.type for d in devices}) > 1:
        raise _wrong_place(home, device_ids, f"Move the module to {devices[0]} first.")
    return devices


def _names_gpus(device_ids: int | Sequence[Device]) -> bool:
    """Tell whether these are numbers of GPUs (without any GPU they count threads)."""
    return not isinstance(device_ids, int) and any(isinstance(d, int) for d in device_ids)


def _wrong_place(home: torch.device, device_ids: object, fix: str) -> ModuleError:
    return ModuleError(
        "DataParallel cannot split over these devices",
        seen=f"device_ids={device_ids!r}, and the module is on {home}",
        fix=fix,
    )
