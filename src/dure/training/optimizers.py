"""Around an optimizer's step: whether its parameters are those of the model, and may be written.

An optimizer made before a model was sharded in place, or before `to_empty` or
``load_state_dict(assign=True)`` replaced shards, holds parameters that get no gradient any more,
and would train nothing. A parameter that was replaced knows by what; before the optimizer uses
gradients it is given that.

Parameters that are offloaded have no values that could be stepped. Those that the ranks of a host
share are written when no rank reads them (epochs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dure.errors import OptimizerError, PeerLost
from dure.tensor.dtensor import DTensor
from dure.tensor.plain_tensors import unsharded
from dure.training.epochs import Epochs, end_read_all

__all__ = [
    "forget_replaced",
    "mark_offloaded",
    "note_replaced",
    "note_unsharded",
    "present",
    "rebind",
]

_REPLACED = "_dure_replaced"
_OFFLOADED = "_dure_offloaded"


Replacement = Callable[[], tuple[torch.Tensor, str]]
"""Returns the parameter that the model has now, and its name."""


def note_replaced(old: torch.Tensor, by: Replacement) -> None:
    """Note a function that returns the parameter which the model has instead of `old`."""
    vars(old)[_REPLACED] = by


def note_unsharded(parameter: torch.Tensor, by: Replacement) -> None:
    """Note the same of an unsharded parameter; weakly, and not pickled with it.

    Args:
        parameter: The module has it for a limited time.
        by: A method, which may belong to an object that holds `parameter`.
    """
    unsharded[parameter] = WeakMethod(by)


def _replacement(old: torch.Tensor) -> Replacement | None:
    by: Replacement | None = vars(old).get(_REPLACED)
    if by is None and old in unsharded:
        by = unsharded[old]()
    return by


def forget_replaced(old: torch.Tensor) -> None:
    """Take back `note_replaced`."""
    vars(old).pop(_REPLACED, None)


def present(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter that the model has now instead of `parameter`, if it was replaced."""
    by = _replacement(parameter)
    return parameter if by is None else by()[0]


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
        OptimizerError: It has state of unsharded parameters; or a parameter is offloaded.
    """
    known = {p for group in optimizer.param_groups for p in group["params"]}
    for group in optimizer.param_groups:
        parameters: list[torch.Tensor] = group["params"]
        for number, old in enumerate(parameters):
            if _OFFLOADED in vars(old):
                raise _refused(
                    optimizer, "the model is offloaded", "", "Call fsdp.onload(model) first."
                )
            by = _replacement(old)
            new, name = (old, "") if by is None else by()
            if new is old:
                continue
            if optimizer.state.get(old) and not _are_alike(old, new):
                raise _refused(
                    optimizer,
                    "the optimizer has state of a parameter that was sharded since",
                    f"{name} {list(old.shape)}",
                    "Make the optimizer after fully_shard; to take its state along, save it and "
                    "load it into the new one.",
                )
            if new in known:
                raise _refused(
                    optimizer,
                    "the optimizer has a parameter twice: the shard, and what it was made from",
                    name,
                    "Make the optimizer once, after fully_shard.",
                )
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
            parameters[number] = new
            known.add(new)


def _are_alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    if not (isinstance(old, DTensor) and isinstance(new, DTensor)):
        return False
    return old.spec.placements == new.spec.placements


def _refused(optimizer: torch.optim.Optimizer, why: str, seen: str, fix: str) -> OptimizerError:
    return OptimizerError(why, op=f"{type(optimizer).__name__}.step", seen=seen, fix=fix)


def _epochs_of(optimizer: torch.optim.Optimizer) -> set[Epochs]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return {epochs for p in parameters if (epochs := vars(p).get("_dure_epochs")) is not None}


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    rebind(optimizer)
    all_epochs = _epochs_of(optimizer)
    end_read_all(all_epochs, together=False)  # of all first: ranks wait for them in any order
    for epochs in all_epochs:
        try:
            epochs.begin_write()
        except PeerLost as error:
            epochs.annotate(error)
            raise


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for epochs in _epochs_of(optimizer):
        epochs.end_write()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
