"""An accelerator without hardware, whose streams show missing waits: see `install`."""

from __future__ import annotations

from typing import Any

import torch

from dure import torch_private
from dure.comm.backends.registry import register_backend
from dure.errors import UsageError
from dure.testing.accelerator import operators, streams
from dure.testing.accelerator.device_module import DeviceModule
from dure.testing.accelerator.memory import NAME, loaded
from dure.testing.accelerator.nccl import BACKEND, create_simulated_nccl
from dure.testing.accelerator.streams import Event, Stream

__all__ = ["Event", "Stream", "install"]

_installed: list[DeviceModule] = []
_set_up: Any = torch_private.later(
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend"
)


def install(seed: int | None = None) -> None:
    """Give this process a device of type "sim", whose streams run late.

    Work on the device is queued, and runs when the host or another stream waits for it. A program
    that lacks a wait or an event reads garbage (NaN, or -1), or what another stream has
    overwritten, at each run. Streams, events and the rest are those of
    ``torch.get_device_module("sim")``, as of `torch.cuda`. Groups serve its tensors by way of the
    host ("cpu:shm,sim:shm"), or by a simulated NCCL ("cpu:shm,sim:simulated_nccl").

    Args:
        seed: Draws the order in which work of several streams runs. None: all work is as late as
            it can be. Later calls change the order of what is queued from then on.

    Raises:
        UsageError: The process has another device of this kind: torch has one place for it
            (PrivateUse1).

    Example:
        ```python
        from dure.testing import accelerator

        accelerator.install()
        device = torch.get_device_module("sim")
        x, side = torch.ones(4, device="sim"), device.Stream()
        with device.stream(side):  # lacks side.wait_stream(device.current_stream())
            y = x + 1
        side.synchronize()
        ```
    """
    streams.draw_order(seed)
    if _installed:
        return
    taken = torch_private.get_privateuse1_name()
    if taken != "privateuseone":
        raise UsageError(
            "this process has another device of torch's kind PrivateUse1",
            op="accelerator.install",
            seen=taken,
            fix="Use the simulated accelerator in a process of its own.",
        )
    module = DeviceModule()
    _set_up(NAME, module)
    torch.serialization.register_package(0, lambda storage: None, loaded)  # pyright: ignore
    operators.register()
    register_backend(BACKEND, create_simulated_nccl, (NAME,))
    _installed.append(module)
