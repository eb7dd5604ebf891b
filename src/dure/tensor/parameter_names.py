"""Names of parameters, which ranks compare when they reduce a gradient.

Ranks that read `.grad` of different parameters of one shape would add gradients that do not belong
together. A name is the same on every rank that runs the same program: the path within the module
that was distributed, and the class of the parameter's own module. It depends neither on the order
in which modules are distributed nor on modules that only one rank has.

A name is an attribute of the parameter, so it lives as long as the parameter. Copies have no name,
nor have the parameters that `Module.to_empty` creates.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from dure.tensor.spec import DTensorSpec

__all__ = ["name_of", "name_parameters"]

_NAMES = "_dure_names"


def name_parameters(module: nn.Module) -> None:
    """Name all DTensors among the parameters of a module that has been distributed.

    A parameter can have several names, in any order: if modules share it, or if its module is
    distributed within another one.
    """
    for path, inner in module.named_modules():
        for name, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
            if not isinstance(getattr(parameter, "spec", None), DTensorSpec):
                continue
            full = f"{path}.{name}" if path else name
            names: set[str] = cast(Any, parameter).__dict__.setdefault(_NAMES, set())
            names.add(f"{full} of a {type(inner).__name__}")


def name_of(parameter: torch.Tensor) -> str:
    """Return a description of a parameter's gradient, the same on all ranks; "" without a name."""
    names: set[str] | None = getattr(parameter, _NAMES, None)
    return f"gradient of {', '.join(sorted(names))}" if names else ""
