"""Communication hooks for DDP, under torch's names: how gradients travel.

`default_hooks` averages, also in 16 bits; `powerSGD_hook` sends matrices of low rank;
`quantization_hooks` sends 8 bits; `post_localSGD_hook` stays inside the host after a while. Each
module has torch's functions and states; a program imports

    from dure.parallel.ddp.hooks import powerSGD_hook as powerSGD

or takes the functions from `dure` itself (`dure.powerSGD_hook`). Where torch's hooks take a process
group as their state, None stands for the group of the DDP module here.

`DDPCommHookType` chooses by the name of a kind, as from a configuration file (torch's convenience).
How hooks run, and what becomes of their errors: comm_hooks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, member
from typing import TYPE_CHECKING, Any, Protocol

from dure.parallel.ddp.hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from dure.parallel.ddp.hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from dure.parallel.ddp.hooks.post_localSGD_hook import PostLocalSGDState
from dure.parallel.ddp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook
from dure.parallel.ddp.hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.parallel.ddp.comm_hooks import CommHook

__all__ = [
    "DDPCommHookType",
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "debugging_hooks",
    "default_hooks",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_hooks",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "register_ddp_comm_hook",
]

debugging_hooks = default_hooks
"""torch has `noop_hook` in a module of this name."""


class _TakesHook(Protocol):
    """A DDP module (by its one method, so that none of it is imported here)."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None: ...


def _plain(hook: CommHook) -> Any:
    def register(model: _TakesHook, state: object = None) -> None:
        model.register_comm_hook(state, hook)

    return member(register)


def _low_rank(hook: CommHook, rank: int) -> Any:
    def register(
        model: _TakesHook, state: ProcessGroup | None = None, start_powerSGD_iter: int = 1000
    ) -> None:
        power = PowerSGDState(state, rank, start_powerSGD_iter)
        model.register_comm_hook(power, hook)

    return member(register)


class DDPCommHookType(Enum):
    """Kinds of hooks; a member's value registers it: ``kind.value(model=ddp, state=group)``.

    Example:
        ```python
        model = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        dist.register_ddp_comm_hook(dist.DDPCommHookType.FP16_COMPRESS, model)
        ```
    """

    ALLREDUCE = _plain(allreduce_hook)
    """The average, as without a hook."""
    FP16_COMPRESS = _plain(fp16_compress_hook)
    """The average, sent as float16."""
    BF16_COMPRESS = _plain(bf16_compress_hook)
    """The average, sent as bfloat16."""
    QUANTIZE_PER_TENSOR = _plain(quantization_pertensor_hook)
    """8 bits, one scale a bucket."""
    QUANTIZE_PER_CHANNEL = _plain(quantization_perchannel_hook)
    """8 bits, one scale for each 512 numbers."""
    POWER_SGD = _low_rank(powerSGD_hook.powerSGD_hook, 1)
    """Matrices of rank 1; the state is a group."""
    POWER_SGD_RANK2 = _low_rank(powerSGD_hook.powerSGD_hook, 2)
    """Matrices of rank 2."""
    BATCHED_POWER_SGD = _low_rank(batched_powerSGD_hook, 1)
    """A complete bucket as one matrix of rank 1."""
    BATCHED_POWER_SGD_RANK2 = _low_rank(batched_powerSGD_hook, 2)
    """A complete bucket as one matrix of rank 2."""
    NOOP = _plain(noop_hook)
    """Nothing is sent: to see what communication costs."""


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType, model: _TakesHook, state: object = None
) -> None:
    """Register a hook of the kind `comm_hook_type` with a DDP module.

    Args:
        comm_hook_type: Which one.
        model: The module.
        state: A process group; the module's own by default.

    Example:
        ```python
        from dure.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook

        ddp = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        register_ddp_comm_hook(DDPCommHookType.BF16_COMPRESS, ddp)
        ddp(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[1.5, 1.5]]  # of 1 and 2
        ```
    """
    comm_hook_type.value(model=model, state=state)
