"""Modules that are made parallel in place, and stay the user's: their names, methods, places.

Such a module gets a class that is made for it: a subclass of its own, and of one that has the new
methods.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from dure.errors import ModuleError

__all__ = ["InPlace", "check_plain", "give_methods"]

_classes: dict[tuple[type[InPlace], type[nn.Module]], type[nn.Module]] = {}


class InPlace:
    """Methods that a module has besides those of its own class."""

    prefix: ClassVar[str]
    """Of the class's name."""
    made_by: ClassVar[str]
    """The function that the program has called."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module without them: ``FSDP<Class>(...)`` is ``Class(...)``."""
        return cls.__bases__[1](*args, **kwargs)

    def __deepcopy__(self, memo: object) -> Any:
        """Refuse: the hooks that make the module parallel cannot be copied."""
        raise ModuleError(
            f"a module cannot be copied after {self.made_by}",
            op="deepcopy",
            seen=type(self).__name__,
            fix=f"Copy the module before {self.made_by}, or its state_dict().",
        )


def check_plain(modules: Iterable[nn.Module], op: str) -> None:
    """Raise a ModuleError if a module was made parallel before, in place or by a wrapper."""
    for module in modules:
        inner = getattr(module, "_orig_mod", module)  # of a compiled module
        if isinstance(inner, InPlace) or hasattr(module, "require_backward_grad_sync"):
            raise ModuleError(
                "the module is data parallel already",
                op=op,
                seen=type(module).__name__,
                fix="Call replicate or fully_shard, and once on each module.",
            )


def give_methods(module: nn.Module, methods: type[InPlace]) -> None:
    """Let a module have methods; its class is ``<prefix><Class>`` from now on."""
    cls = type(module)
    if (methods, cls) not in _classes:
        made = type(f"{methods.prefix}{cls.__name__}", (methods, cls), {})
        _classes[methods, cls] = made
    module.__class__ = _classes[methods, cls]
