"""Names of parameters, which ranks compare when they reduce a gradient.

Ranks that read `.grad` of different parameters of one shape would add gradients that do not belong
together. A name is what every rank that runs the same program knows: the path within the module
that was distributed, and the class of the parameter's own module. It depends neither on the order
in which modules are distributed nor on modules that one rank has alone.

A name is an attribute of the parameter, so that it lives as long. Copies have none, nor does what
`Module.to_empty` puts in a parameter's place.
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

    A parameter that is named several times keeps all names, in any order: one that modules share,
    or one of a module that is distributed within another.
    """
    for path, inner in module.named_modules():
        for name, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
            if not isinstance(getattr(parameter, "spec", None), DTensorSpec):
                continue
            full = f"{path}.{name}" if path else name
            names: set[str] = cast(Any, parameter).__dict__.setdefault(_NAMES, set())
            names.add(f"{full} of a {type(inner).__name__}")


def name_of(parameter: torch.Tensor) -> str:
    """Return a text that is the same on all ranks; "" if a parameter has no name."""
    names: set[str] | None = getattr(parameter, _NAMES, None)
    return f"gradient of {', '.join(sorted(names))}" if names else ""
