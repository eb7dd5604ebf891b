"""`DataParallel`: one process, one module, a batch split over devices or threads.

    scatter   cut the batch              splitting.py
    replicate a module object each       replicas.py
    apply     run them at the same time  apply.py
    gather    join the results           splitting.py

All of it is one autograd graph, so that backward needs nothing of its own: gradients of all parts
end in the one module's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dure.errors import ModuleError, warn_deprecated
from dure.parallel.dp.apply import parallel_apply
from dure.parallel.dp.devices import Device, as_device, chosen_devices
from dure.parallel.dp.replicas import replicate
from dure.parallel.dp.splitting import gather, scatter_kwargs

__all__ = ["DataParallel", "data_parallel"]


class DataParallel(torch.nn.Module):
    """Split each batch over devices of this process: GPUs, or threads on the CPU.

    For programs that have it. New ones do better with `DistributedDataParallel`: replicas here
    share one Python interpreter, their backward runs in one thread, and modules are taken apart and
    put together for each forward (docs/mixed_precision.md has figures).

    On the CPU replicas use the module's own parameters; nothing is copied but buffers. The first
    replica's buffers are the module's: batch norm keeps the running statistics of the first part.

    Threads:
        One thread at a time calls forward.

    Numerics:
        Gradients are those of the full batch, up to the order of sums; statistics of the batch
        (batch norm) are taken of each part alone.

    Args:
        module: The module; on the first device.
        device_ids: The devices. On the CPU ["cpu", "cpu"], or 2, is two threads; without any GPU
            so is [0, 1]. By default all GPUs, or as many threads as torch uses; a forward uses as
            many of them as the batch has parts for.
        output_device: Where results are put together; the first device by default, -1 is the CPU.
        dim: The dimension of inputs and outputs that is the batch.

    Raises:
        ModuleError: The module is elsewhere, or cannot be replicated; from forward: it was moved.
        ShapeError: From forward: arguments that do not split into the same number of parts.

    Example:
        ```python
        model = dist.DataParallel(torch.nn.Linear(2, 1), device_ids=["cpu", "cpu"])  # two threads
        assert model(torch.ones(4, 2)).shape == (4, 1)
        ```
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: int | Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        warn_deprecated(
            "DataParallel",
            "DistributedDataParallel, whose replicas have their own Python interpreter and "
            "backward, also on one machine (`dure run --nproc N`)",
        )
        self._devices = chosen_devices(module, device_ids)
        self.module, self.dim = module, dim
        self.device_ids = [d.index if d.type != "cpu" else d for d in self._devices]
        home = self._devices[0]
        self.output_device = home if output_device is None else as_device(output_device, home.type)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on all parts of the batch."""
        return _run(self.module, (inputs, kwargs), self._devices, self.output_device, self.dim)


def data_parallel(
    module: torch.nn.Module,
    inputs: Any,
    device_ids: int | Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call `module` with the batch split over devices: `DataParallel` as a function.

    Args:
        module: The module; on the first device.
        inputs: Its arguments: a tuple of them, or the only one.
        device_ids: As for `DataParallel`.
        output_device: As for `DataParallel`.
        dim: As for `DataParallel`.
        module_kwargs: Its keyword arguments.

    Returns:
        The module's output for the complete batch, on `output_device`.

    Raises:
        UsageError: As `DataParallel`.

    Example:
        ```python
        model = torch.nn.Linear(2, 1)
        x = torch.ones(4, 2)
        assert torch.equal(dist.data_parallel(model, x), model(x))  # without GPUs: on the CPU alone
        ```
    """
    given = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    devices = chosen_devices(module, device_ids)
    home = devices[0]
    target = home if output_device is None else as_device(output_device, home.type)
    return _run(module, (given, module_kwargs or {}), devices, target, dim)


def _run(
    module: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    devices: Sequence[torch.device],
    target: torch.device,
    dim: int,
) -> Any:
    """Scatter, replicate, apply, gather."""
    _check_place(module, devices[0])
    inputs, kwargs = scatter_kwargs(*arguments, devices, dim)
    if not inputs:
        return module()
    if len(inputs) == 1:
        return module(*inputs[0], **kwargs[0])
    used = devices[: len(inputs)]
    replicas = replicate(module, used, detach=not torch.is_grad_enabled())
    return gather(parallel_apply(replicas, inputs, kwargs, used), target, dim)


def _check_place(module: torch.nn.Module, home: torch.device) -> None:
    named = [*module.named_parameters(), *module.named_buffers()]
    elsewhere = [(name, t.device) for name, t in named if t.device != home]
    if elsewhere:
        raise ModuleError(
            "DataParallel's module is not where its first device is",
            parameters=tuple(name for name, _ in elsewhere),
            seen=f"{elsewhere[0][0]} is on {elsewhere[0][1]}, not on {home}",
            fix=f"Move the module to {home}.",
        )
