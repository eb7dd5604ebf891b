"""`state_dict` and `load_state_dict` of an object replaced by functions, and what they were before.

Functions that replace a method call it through `original_method`. Otherwise an object that is
given replacements twice would call itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["original_method", "replace_methods"]

_BEFORE = "_dure_before"


def replace_methods(
    inner: nn.Module | torch.optim.Optimizer, take: Callable[[], Any], put: Callable[[Any], Any]
) -> None:
    """Replace `state_dict` of an object by `take`, and `load_state_dict` by `put`."""
    found: Any = inner
    for name, function in (("state_dict", take), ("load_state_dict", put)):
        setattr(function, _BEFORE, original_method(getattr(found, name)))
        setattr(found, name, function)


def original_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that was there before `replace_methods`; without that, the method."""
    return getattr(method, _BEFORE, method)
