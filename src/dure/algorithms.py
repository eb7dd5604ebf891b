"""torch's paths: `torch.distributed.algorithms` and what lies under it, for programs moved over.

A program that imports ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`` finds the same
names at ``dure.algorithms.ddp_comm_hooks.powerSGD_hook``. Nothing lives here: each path stands for
the module that is the names' home, and Dure's own code imports them there.
"""

from __future__ import annotations

import sys

from dure.parallel import averaging as model_averaging
from dure.parallel.averaging import averagers, packing
from dure.parallel.ddp import hooks as ddp_comm_hooks
from dure.parallel.ddp.hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from dure.parallel.optim import overlap as ddp_zero_hook
from dure.training import join
from dure.training.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable", "ddp_comm_hooks", "join", "model_averaging"]

# `import dure.algorithms.join` first imports this module, and then finds the other here.
sys.modules |= {
    f"{__name__}.{path}": module
    for path, module in {
        "join": join,
        "ddp_comm_hooks": ddp_comm_hooks,
        "ddp_comm_hooks.ddp_zero_hook": ddp_zero_hook,
        "ddp_comm_hooks.debugging_hooks": default_hooks,
        "ddp_comm_hooks.default_hooks": default_hooks,
        "ddp_comm_hooks.post_localSGD_hook": post_localSGD_hook,
        "ddp_comm_hooks.powerSGD_hook": powerSGD_hook,
        "ddp_comm_hooks.quantization_hooks": quantization_hooks,
        "model_averaging": model_averaging,
        "model_averaging.averagers": averagers,
        "model_averaging.hierarchical_model_averager": averagers,
        "model_averaging.utils": packing,
    }.items()
}
