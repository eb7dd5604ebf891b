"""The user's names: those that parameters and buffers have in the module without its wrappers.

A wrapper holds the wrapped module under an attribute, which then is a part of every name below it:
``module.`` (data parallel), ``_orig_mod.`` (compiled), ``_checkpoint_wrapped_module.`` (recomputed
in backward). A module may name more of its own with a method, torch's ``_fqn_modifiers``. Here
such attributes are left out of names, at any depth. Some wrappers leave theirs out of
``state_dict()`` too; so a key's module is the longest prefix that is a module's path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from dure.errors import UsageError
from dure.parallel import DistributedDataParallel
from dure.parallel.dp import DataParallel

__all__ = ["WRAPPERS", "Names"]

WRAPPERS = (
    DistributedDataParallel,
    DataParallel,
    nn.parallel.DistributedDataParallel,
    nn.parallel.DataParallel,
)
_COMPILED, _RECOMPUTED = "_orig_mod", "_checkpoint_wrapped_module"


class Names:
    """The names of one model.

    Args:
        model: The model, in any wrappers.
        modifiers: The name of the method with which a module names children to be left out.

    Attributes:
        of_parameter: For each parameter, the places where it is.
        of_buffers: The places of all buffers.
    """

    def __init__(self, model: nn.Module, modifiers: str = "_fqn_modifiers") -> None:
        self.of_parameter: dict[nn.Parameter, list[str]] = {}
        self.of_buffers: set[str] = set()
        self._modules: dict[nn.Module, str] = {}
        self._prefixes: dict[str, str] = {}
        self._modifiers = modifiers
        self._enter(model, "", "")

    def _enter(self, module: nn.Module, key: str, name: str) -> None:
        self._modules.setdefault(module, name)
        self._prefixes.setdefault(key, name)
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            self.of_parameter.setdefault(parameter, []).append(name + own)
        for own, _ in module.named_buffers(recurse=False, remove_duplicate=False):
            self.of_buffers.add(name + own)
        left_out = self._left_out(module)
        children = cast(dict[str, nn.Module | None], vars(module)["_modules"])
        for child, inner in children.items():
            if inner is not None:
                in_keys = left_out.get(child, True)
                inner_name = name if child in left_out else f"{name}{child}."
                self._enter(inner, f"{key}{child}." if in_keys else key, inner_name)

    def _left_out(self, module: nn.Module) -> dict[str, bool]:
        """Return the children that names leave out, and whether keys have them."""
        found = {_COMPILED: True, _RECOMPUTED: False}
        if isinstance(module, WRAPPERS):
            found["module"] = True
        method: Any = getattr(module, self._modifiers, None)
        if callable(method):
            found |= dict.fromkeys(cast(Mapping[str, str], method()).values(), False)
        return found

    def of_key(self, key: str) -> str:
        """Return the user's name for a key of the model's ``state_dict()``."""
        end = len(key)
        while (end := key.rfind(".", 0, end) + 1) and key[:end] not in self._prefixes:
            end -= 1
        return self._prefixes[key[:end]] + key[end:]

    def prefix_of(self, module: nn.Module) -> str:
        """Return the prefix of a module's names, with the dot.

        Raises:
            UsageError: The module is not in the model.
        """
        if module not in self._modules:
            kind = type(module).__qualname__
            raise UsageError("a submodule is not in the model", seen=f"a {kind}")
        return self._modules[module]
