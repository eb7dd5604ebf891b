"""What the arguments of `DistributedDataParallel` mean, and which of torch's are refused.

Torch's class has grown arguments over the years that overlap, or that work around its own limits.
Those that make sense here are accepted with torch's meaning; a program that relies on another is
told so when it wraps its module.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dure.comm.group import ProcessGroup
from dure.comm.world import resolve
from dure.errors import ModuleError
from dure.parallel.ddp.bucketing import FIRST_CAP_BYTES

if TYPE_CHECKING:
    import torch

__all__ = ["BucketCaps", "BufferRules", "buffer_rules", "chosen_group", "refuse_delayed"]

_DEFAULT_CAP_MB = 25.0
_MIB = 1 << 20


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
        what = "is ignored beside" if forward_sync is not None else "is deprecated in favour of"
        warnings.warn(
            f"`broadcast_buffers` {what} `forward_sync_buffers`, which leaves the buffers of a "
            "newly wrapped module to `init_sync`",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync is not None:
        return BufferRules(forward_sync, True)
    return BufferRules(broadcast_buffers is not False, broadcast_buffers is not False)


def chosen_group(group: ProcessGroup | None, device_mesh: Any) -> ProcessGroup:
    """Return the group that averages: `group`, or that of a mesh of one axis (Any: any mesh)."""
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
