"""What a GradScaler knows of a step that is not over: which optimizers it has unscaled or stepped.

It is not in the scaler's ``state_dict``. So a scaler that gets a state between `unscale_` and
`update` (a loss became NaN, a rank is lost) would refuse the next `unscale_`, since it takes the
gradients for unscaled already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

__all__ = ["Stages", "set_stages", "stages_of"]

Stages = dict[str, tuple[str, dict[str, float]]]
"""By the optimizer's name: its stage, and for each device whether a gradient was not finite."""


def stages_of(scaler: object, parts: Mapping[str, Any]) -> Stages:
    """Return the stages of a scaler's optimizers that are among `parts`; of others, nothing.

    Args:
        scaler: Any object; one that is no GradScaler has none.
        parts: Objects by name.
    """
    known = getattr(scaler, "_per_optimizer_states", None) or {}
    found: Stages = {}
    for name, part in parts.items():
        state: Any = known.get(id(part))
        if state is not None and state["stage"] is not OptState.READY:
            not_finite = {str(d): float(t) for d, t in state["found_inf_per_device"].items()}
            found[name] = state["stage"].name, not_finite
    return found


def set_stages(scaler: object, stages: Stages, parts: Mapping[str, Any]) -> None:
    """Give a scaler the stages of `stages_of`; all other optimizers are before `unscale_`."""
    known: Any = getattr(scaler, "_per_optimizer_states", None)
    if known is None:
        return
    known.clear()
    for name, (stage, not_finite) in stages.items():
        if name in parts:
            state = known[id(parts[name])]
            state["stage"] = OptState[stage]
            state["found_inf_per_device"] = {
                torch.device(device): torch.tensor(value, device=device)
                for device, value in not_finite.items()
            }
