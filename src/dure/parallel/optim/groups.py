"""Groups of parameters: what is checked of them, compared between ranks, and copied between sets.

A group is torch's: a dictionary with ``params``, perhaps ``param_names``, and options.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dure.comm.agreement import describe_tensor
from dure.errors import OptimizerError
from dure.parallel.optim.partition import clusters_of

__all__ = ["as_list", "check_layouts", "copy_options", "described", "from_torch", "options_of"]

_OF_THE_GROUP_ALONE = frozenset({"params", "param_names"})


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return what of a group is not its parameters (Any: options)."""
    return {k: v for k, v in group.items() if k not in _OF_THE_GROUP_ALONE}


def described(groups: Sequence[dict[str, Any]], first_group: int = 0) -> list[str]:
    """Describe each parameter in `groups`, as ranks compare it; the first is `first_group`."""
    lines: list[str] = []
    for g, group in enumerate(groups, first_group):
        names = group.get("param_names") or [
            f"param_groups[{g}].params[{i}]" for i in range(len(group["params"]))
        ]
        ties = {i: c[0] for c in clusters_of(group["params"]) for i in c if i != c[0]}
        for i, (name, parameter) in enumerate(zip(names, group["params"], strict=True)):
            tie = f" (in the memory of {names[ties[i]]})" if i in ties else ""
            lines.append(describe_tensor(name, parameter) + tie)
    return lines


def as_list(params: Iterable[Any]) -> Any:
    """Return `params` as torch's constructor takes them (Any), a single tensor as it is."""
    return params if isinstance(params, torch.Tensor) else list(params)


def check_layouts(param_group: dict[str, Any]) -> None:
    """Raise for parameters that cannot be exchanged."""
    params = param_group["params"]
    tensors = [params] if isinstance(params, torch.Tensor) else list(params)
    param_group["params"] = tensors
    sparse = [
        i
        for i, p in enumerate(p[1] if isinstance(p, tuple) else p for p in tensors)
        if isinstance(p, torch.Tensor) and p.layout is not torch.strided
    ]
    if sparse:
        raise OptimizerError(
            "a sharded optimizer is for dense parameters (gradients may be sparse)",
            seen=f"parameter {sparse[0]} of the group is not dense",
        )


def copy_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copy what is not a parameter from some groups to their counterparts (Any: options)."""
    for theirs, ours in zip(source, target, strict=True):
        ours.update(options_of(theirs))


def from_torch(error: Exception) -> Exception:
    """Make what torch says of parameters an error of ours."""
    return error if isinstance(error, OptimizerError) else OptimizerError(str(error))
