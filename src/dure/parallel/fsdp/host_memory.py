"""Shards in the host's memory while modules compute on a device: `CPUOffloadPolicy`.

    shards (host)  --copy, gather stream-->  flat (device)  --all_gather--> ...
    shard.grad (host)  <--copy, reduce stream--  reduced part (device)

Both copies do not block if the memory is page-locked. So the host waits before the program sees
either side of them:

* for gradients, at the end of backward, or before hooks of the program get them (group.py);
* for shards, which the program may write between steps: at the end of a forward and of a backward
  (`Strategy.release_shards`).

With an `OffloadPolicy.path` the host's memory is that of files (mapped_files.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.capture import in_fake_mode
from dure.comm.pinned import pinned_empty
from dure.errors import DeviceError
from dure.parallel.fsdp.policies import CPUOffloadPolicy, OffloadPolicy

if TYPE_CHECKING:
    from dure.parallel.fsdp.axes import DataAxes

__all__ = ["HostMemory", "host_memory_of"]


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Where a `fully_shard` call keeps shards and gradients.

    Attributes:
        device: Where its modules compute.
        pins: The memory is page-locked.
    """

    device: torch.device
    pins: bool

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory [shape]."""
        if self.pins:
            return pinned_empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device="cpu")

    def shard_in(self, part: torch.Tensor) -> torch.Tensor:
        """Return a shard with its values here; itself if it is here, or has no values."""
        if part.is_meta or (part.device.type == "cpu" and not (self.pins and not part.is_pinned())):
            return part
        if type(part) is not torch.Tensor:  # subclasses know how they are copied
            moved = part.to("cpu")
            return moved.pin_memory() if self.pins else moved
        return self.empty(part.shape, part.dtype).copy_(part)

    def gradient_in(self, part: torch.Tensor, dtype: torch.dtype, waits: bool) -> torch.Tensor:
        """Copy part of a gradient here, in the current stream.

        Unless `waits` is set, the host must wait for this stream before it reads the result.
        """
        return self.empty(part.shape, dtype).copy_(part.to(dtype), non_blocking=not waits)


def host_memory_of(policy: OffloadPolicy | None, axes: DataAxes) -> HostMemory | None:
    """Return where a policy has shards that modules on a device compute with.

    Args:
        policy: As the program gave it.
        axes: Over which parameters are sharded; of a mesh of CPUs they are on the host anyway.

    Returns:
        None if shards stay on the mesh's device.

    Raises:
        DeviceError: The ranks have no backend for tensors of the host.
    """
    kind = axes.mesh.device_type
    in_files = policy is not None and policy.path is not None
    if kind == "cpu" or not (in_files or isinstance(policy, CPUOffloadPolicy)):
        return None
    for group in filter(None, (axes.shard_group, axes.replicate_group)):
        if not group.backend_of("cpu"):
            raise DeviceError(
                "shards on the host need a backend for CPU tensors",
                op="fully_shard",
                seen=f"offload_policy={policy}, and groups of {group.backend_config}",
                fix="Name one in init_process_group, such as cpu:shm,cuda:nccl; it is the default.",
            )
    device = torch.device(kind)
    module: Any = torch.get_device_module(device)  # Any: torch.cuda and modules like it
    if hasattr(module, "current_device"):
        device = torch.device(kind, module.current_device())
    asks = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and not in_files
    pins = asks and not in_fake_mode() and pinned_empty((1,), torch.uint8).is_pinned()
    return HostMemory(device, pins)
