"""Replicas of a module: as many as there are parts of a batch, for one forward.

A replica is a new tree of module objects, so that threads do not write to each other's attributes.
Its parameters and buffers depend on where it runs:

| replica | parameters | buffers |
| --- | --- | --- |
| the first | the module's own | the module's own: running statistics are updated in place |
| others on the same device (threads) | the module's own: no copy | copies, lost after the forward |
| others on other devices | copies, through which gradients flow back | copies, lost as well |

With the module's own parameters in all replicas there is one graph, and autograd adds up their
gradients as those of a parameter that is used several times.
"""

# torch's modules are taken apart and put together here: by the dictionaries they are made of.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from dure.errors import ModuleError
from dure.parallel.dp.devices import Device, as_devices, home_of

__all__ = ["replicate"]

M = TypeVar("M", bound=nn.Module)


def replicate(network: M, devices: int | Sequence[Device], detach: bool = False) -> list[M]:
    """Return a replica of `network` for each device; see the table in the module's text.

    Unlike torch's, replicas keep their parameters registered: ``next(self.parameters())`` works.

    Args:
        network: The module; on the first device.
        devices: The devices; numbers are of the module's kind. A single number counts threads.
        detach: Cut the replicas off the graph: no gradients flow back.

    Raises:
        ModuleError: Something in the module cannot be replicated.

    Cost:
        No copy of a parameter on the same device; one on each other device.
    """
    home = home_of(network)
    _refuse_what_cannot_be_replicated(network)
    return [
        _replica(network, _Tensors(home, device, first=i == 0, detach=detach))
        for i, device in enumerate(as_devices(devices, home.type))
    ]


def _refuse_what_cannot_be_replicated(network: nn.Module) -> None:
    for path, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModuleError(
                "a compiled TorchScript module cannot be replicated",
                parameters=(path,),
                seen=f"{path or 'the module'} is a {type(module).__name__}",
                fix="Wrap the module before scripting it, or use DistributedDataParallel.",
            )
        if hasattr(module, "require_backward_grad_sync"):
            raise ModuleError(
                "DataParallel cannot replicate a module that communicates",
                parameters=(path,),
                seen=f"{path or 'the module'} is a {type(module).__name__}",
                fix="Put DataParallel inside DistributedDataParallel, or do without it.",
            )


class _Tensors:
    """Gives one replica its tensors; a tensor that is in several places is one there, too."""

    def __init__(
        self, home: torch.device, device: torch.device, *, first: bool, detach: bool
    ) -> None:
        self.shares = device == home
        self._device, self._first, self._detach = device, first, detach
        self._known: dict[torch.Tensor, torch.Tensor] = {}

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the replica's tensor for a parameter."""
        if self.shares and not self._detach:
            return tensor
        return self._once(tensor, lambda t: t.to(self._device))

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the replica's tensor for a buffer."""
        if self._first and self.shares:
            return tensor
        return self._once(tensor, lambda t: t.clone() if self.shares else t.to(self._device))

    def _once(
        self, tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        if tensor not in self._known:
            self._known[tensor] = make(tensor.detach() if self._detach else tensor)
        return self._known[tensor]


def _replica(network: M, tensors: _Tensors) -> M:
    """Build one replica."""
    twins: dict[nn.Module, nn.Module] = {}
    for module in network.modules():
        # A shallow copy; modules that hold their parameters twice (recurrent ones) extend it.
        twins[module] = module._replicate_for_data_parallel()
    for module, twin in twins.items():
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else twins[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                twin._parameters[name] = None
                continue
            copy = tensors.parameter(parameter)
            if copy is not parameter:
                setattr(twin, name, copy)  # recurrent layers take it into their list
            # Any tensor will do here, though annotated as Parameter: lookups and iteration work.
            twin._parameters[name] = copy  # pyright: ignore[reportArgumentType]
        for name, buffer in module._buffers.items():
            twin._buffers[name] = None if buffer is None else tensors.buffer(buffer)
    return twins[network]  # pyright: ignore[reportReturnType]
