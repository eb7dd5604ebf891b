"""Optimizers that have parameters of before, or of an offloaded model.

An optimizer made before `fully_shard`, or before `to_empty` or ``load_state_dict(assign=True)``
replaced shards, holds parameters that get no gradient any more, and would train nothing. A
parameter that was replaced knows by what; when the optimizer next steps, it is given that.

Parameters that are offloaded have no values that could be stepped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dure.errors import OptimizerError
from dure.tensor.dtensor import DTensor

if TYPE_CHECKING:
    from dure.parallel.fsdp.parameter import FSDPParameter

__all__ = ["forget_replaced", "mark_offloaded", "note_replaced", "rebind"]

_REPLACED = "_dure_replaced"
_OFFLOADED = "_dure_offloaded"


def note_replaced(old: torch.Tensor, by: FSDPParameter) -> None:
    """Note that what the model has instead of `old` is the shard of `by`."""
    vars(old)[_REPLACED] = by


def forget_replaced(old: torch.Tensor) -> None:
    """Take back `note_replaced`."""
    vars(old).pop(_REPLACED, None)


def mark_offloaded(parameter: torch.Tensor, offloaded: bool) -> None:
    """Have optimizers refuse to step a parameter, or step it again."""
    if offloaded:
        vars(parameter)[_OFFLOADED] = True
    else:
        vars(parameter).pop(_OFFLOADED, None)


def rebind(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the shards of parameters that were replaced.

    State moves along where it was a shard's, too.

    Raises:
        OptimizerError: It has state of whole parameters; or a parameter is offloaded.
    """
    known: set[torch.Tensor] | None = None
    for group in optimizer.param_groups:
        parameters: list[torch.Tensor] = group["params"]
        for number, old in enumerate(parameters):
            attributes = vars(old)
            if _OFFLOADED in attributes:
                raise OptimizerError(
                    "the model is offloaded",
                    op=f"{type(optimizer).__name__}.step",
                    fix="Call fsdp.onload(model) first.",
                )
            by: FSDPParameter | None = attributes.get(_REPLACED)
            if by is None or by.sharded is old:
                continue
            if known is None:
                known = {p for each in optimizer.param_groups for p in each["params"]}
            _check_state(optimizer, old, by)
            if by.sharded in known:
                raise OptimizerError(
                    "the optimizer has a parameter twice: the shard, and what it was made from",
                    op=f"{type(optimizer).__name__}.step",
                    seen=by.name,
                    fix="Make the optimizer once, after fully_shard.",
                )
            if old in optimizer.state:
                optimizer.state[by.sharded] = optimizer.state.pop(old)
            parameters[number] = by.sharded
            known.add(by.sharded)


def _check_state(optimizer: torch.optim.Optimizer, old: torch.Tensor, by: FSDPParameter) -> None:
    is_alike = isinstance(old, DTensor) and old.spec.placements == by.spec.placements
    if optimizer.state.get(old) and not is_alike:
        raise OptimizerError(
            "the optimizer has state of a parameter that was sharded since",
            op=f"{type(optimizer).__name__}.step",
            seen=f"{by.name} {list(old.shape)}",
            fix="Make the optimizer after fully_shard; to take its state along, save it and load "
            "it into the new one.",
        )
