"""The state that an optimizer will have of a parameter, before it has stepped.

Optimizers make their state at the first step. To load a checkpoint into the tensors of a state,
there must be one. It is made by a step of a twin of the optimizer that has one parameter, all
zeros, with a gradient of zeros: the optimizer, its parameters and its hooks are not touched. What
counts steps is then put back, so that going on with it is the same as beginning without.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, cast

import torch
from torch import nn

from dure.errors import UsageError

__all__ = ["fresh_state"]

_BEFORE_STEPS = {"step": 0, "mu_product": 1}


def fresh_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """Return what the first step will make, with nothing learned in it.

    Args:
        optimizer: Any of torch's that updates each parameter by itself.
        group: The parameter's group.
        parameter: A parameter; its state has its mesh and placements.

    Raises:
        UsageError: The optimizer does not step so.

    Cost: memory of the parameter twice, for the moment.
    """
    scratch = nn.Parameter(torch.zeros_like(parameter.detach()))
    scratch.grad = torch.zeros_like(scratch.detach())
    kind = type(optimizer)
    twin = cast(Any, object.__new__(kind))
    vars(twin).update(vars(optimizer))
    twin.state = defaultdict[Any, Any](dict)
    twin.param_groups = [{**group, "params": [scratch]}]
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    try:
        cast(Any, kind).step(twin)  # the class's: an instance's may be a scheduler's
    except Exception as e:
        raise UsageError(
            f"the state of a {kind.__qualname__} is not known before it has stepped",
            seen=f"{type(e).__name__}: {e}",
            fix="Step it once, with gradients of zeros and lr=0.",
        ) from e
    state = dict(cast(dict[str, Any], twin.state.get(scratch, {})))
    for key, value in _BEFORE_STEPS.items():
        if isinstance(state.get(key), torch.Tensor):
            state[key].fill_(value)
        elif key in state:
            state[key] = value
    return state
