"""Communication hooks for DDP, under torch's names: how gradients travel.

`default_hooks` averages, also in 16 bits; `powerSGD_hook` sends matrices of low rank;
`quantization_hooks` sends 8 bits; `post_localSGD_hook` stays inside the host after a while;
`debugging_hooks` sends nothing. Each module has torch's functions and states; a program imports

    from dure.parallel.ddp.hooks import powerSGD_hook as powerSGD

or takes the functions from `dure` itself (`dure.powerSGD_hook`). Where torch's hooks take a process
group as their state, None stands for the group of the DDP module here, whatever that is.

How hooks run, and what becomes of their errors: hooking.py.
"""

from __future__ import annotations

from dure.parallel.ddp.hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from dure.parallel.ddp.hooks.choosing import DDPCommHookType, register_ddp_comm_hook
from dure.parallel.ddp.hooks.debugging_hooks import noop_hook
from dure.parallel.ddp.hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from dure.parallel.ddp.hooks.post_localSGD_hook import PostLocalSGDState
from dure.parallel.ddp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook
from dure.parallel.ddp.hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

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
