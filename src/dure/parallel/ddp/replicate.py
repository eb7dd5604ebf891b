"""`replicate`: data parallelism in place, as `fully_shard` shards in place.

The module stays the user's: its names in state dictionaries, its methods, its place in other
modules. A `DistributedDataParallel` beside it does the work; hooks around forward call it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dure.comm.untraced import untraced
from dure.errors import UsageError
from dure.parallel.ddp.comm_hooks import CommHook
from dure.parallel.ddp.module import DistributedDataParallel
from dure.training.in_place import InPlace, check_plain, give_methods

__all__ = ["DDP", "replicate"]

_REPLICA = "_dure_replica"


class DDP(InPlace):
    """What a module is besides its own class after `replicate`.

    Obtained from:
        `replicate`, which adds it to the classes of the module.
    """

    prefix = "DDP"
    made_by = "replicate"

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Average gradients from the next forward on, or add them up on this rank (no_sync)."""
        _replica(self).require_backward_grad_sync = requires_gradient_sync

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Have a function reduce the buckets; see `DistributedDataParallel.register_comm_hook`."""
        _replica(self).register_comm_hook(state, hook)


def replicate(
    module: nn.Module, ignored_modules: Iterable[nn.Module] | None = None, **kwargs: Any
) -> nn.Module:
    """Have the ranks train replicas of a module, in place: backward averages gradients.

    Args:
        module: The module. What `fully_shard` has within it is left to that.
        ignored_modules: Left alone.
        **kwargs: Those of `DistributedDataParallel`, and `device_id`, a device.

    Returns:
        `module`, whose class is now ``DDP<Class>``, with the methods of `DDP`.

    Raises:
        ModuleError: The module is sharded or replicated already, or cannot be; see there.
        UsageError: `mixed_precision`, which runs another forward than the module's.

    Collective:
        All ranks of the group.

    Example:
        ```python
        from dure._composable import replicate

        model = replicate(torch.nn.Linear(2, 1))
        model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert model.weight.grad.tolist() == [[1.5, 1.5]]  # of 1 and 2
        ```
    """
    check_plain([module], "replicate")
    if kwargs.get("mixed_precision") is not None:
        raise UsageError(
            "mixed_precision is not for modules that are replicated in place",
            op="replicate",
            fix="Wrap the module in DistributedDataParallel, or use torch.autocast.",
        )
    if "device_id" in kwargs:
        device_id = kwargs.pop("device_id")
        on_cpu = device_id is None or torch.device(device_id).type == "cpu"
        kwargs["device_ids"] = None if on_cpu else [device_id]
    left = {p for m in ignored_modules or () for p in m.parameters()}
    left |= {p for m in module.modules() if hasattr(m, "_dure_fsdp") for p in m.parameters()}
    before = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    module._ddp_params_and_buffers_to_ignore = [  # pyright: ignore
        *before,
        *(name for name, p in module.named_parameters(remove_duplicate=False) if p in left),
    ]
    # Not an attribute that is a module within the module.
    object.__setattr__(module, _REPLICA, DistributedDataParallel(module, **kwargs))
    module.register_forward_pre_hook(_before_forward, prepend=True)
    module.register_forward_hook(_after_forward)
    give_methods(module, DDP)
    return module


def _replica(module: Any) -> DistributedDataParallel:
    return module._dure_replica


@untraced
def _before_forward(module: nn.Module, _: object) -> None:
    replica = _replica(module)
    replica._before_forward(_syncs(replica))  # pyright: ignore[reportPrivateUsage]


@untraced
def _after_forward(module: nn.Module, _: object, outputs: object) -> None:
    replica = _replica(module)
    replica._after_forward(_syncs(replica), outputs)  # pyright: ignore[reportPrivateUsage]


def _syncs(replica: DistributedDataParallel) -> bool:
    return torch.is_grad_enabled() and replica.require_backward_grad_sync
