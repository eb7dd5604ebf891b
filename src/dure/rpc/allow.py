"""The list of functions that others may call in this process: `init_rpc(allow=[...])`.

A list contains functions, classes and modules. A module allows the functions and classes that are
*defined* in it, and not those that it imports. With a list, a message may name nothing else, and
its values are plain, tensors or references (`codec`). Names with dots could reach methods without
the checks of the list: a method is called on a value that is stored here (`method`), if its class
is allowed.

Without a list every process of the job may call everything, as its processes trust each other.
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

from dure.errors import RpcError, UsageError

__all__ = ["Allowed"]

_OWN = {
    "dure.rpc.optimizer": {"_make", "_step"},
    "dure.rpc.profiling": {"profiled"},
    "dure.rpc.remote_module": {"_forward", "_make", "_parameters", "_train"},
    "dure.rpc.rref": {"call_method", "run_backward", "value_type"},
    "dure.rpc.termination": {"enter", "report"},
}
"""Functions of RPC itself. Functions of the program that they run must be on the list."""


class Allowed:
    """The functions, classes and modules that others may call.

    Args:
        things: Functions, classes and modules.

    Raises:
        UsageError: One of them is something else, or cannot be found by its name: a lambda, a
            partial, a bound method, a function within a function, a builtin.
    """

    def __init__(self, things: Iterable[object]) -> None:
        self._modules: set[str] = set()
        self._names: set[tuple[str, str]] = set()
        for thing in things:
            if isinstance(thing, ModuleType):
                self._modules.add(thing.__name__)
            elif isinstance(thing, FunctionType | type) and _is_top(thing):
                self._names.add((thing.__module__, thing.__qualname__))
            else:
                raise UsageError(
                    "this cannot be allowed by name",
                    op="init_rpc",
                    seen=repr(thing),
                    fix="Name functions and classes at the top of modules, and modules.",
                )

    def function(self, module_name: str, name: str) -> Any:
        """Return the function that a message calls.

        Raises:
            RpcError: It is not on the list.
        """
        if name in _OWN.get(module_name, ()):
            return getattr(importlib.import_module(module_name), name)
        return self.find(module_name, name)

    def find(self, module_name: str, name: str) -> Any:
        """Return a function or class of the list that a message names.

        Raises:
            RpcError: It is not on the list.
        """
        if "." not in name and self._has(module_name, name):
            found = getattr(importlib.import_module(module_name), name, None)
            if isinstance(found, FunctionType | type) and self._allows(found):
                return found
        raise _refusal(f"{module_name}.{name}")

    def find_error(self, module_name: str, name: str) -> Any:
        """Return a type of exceptions that an answer names: a builtin one, or one of the list.

        Raises:
            RpcError: It is not on the list.
        """
        if module_name == "builtins":
            return vars(builtins).get(name)
        return self.find(module_name, name)

    def method(self, owner: object, name: str) -> Callable[..., Any]:
        """Return a method of an object that is stored here, if its class is on the list.

        Raises:
            RpcError: The class is not on the list, or has no such method, or its name begins with
                an underscore.
        """
        function = getattr(type(owner), name, None)
        if name.startswith("_") or not callable(function) or not self._allows(type(owner)):
            raise _refusal(f"{type(owner).__module__}.{type(owner).__qualname__}.{name}")
        return getattr(owner, name)

    def _has(self, module_name: str, name: str) -> bool:
        return module_name in self._modules or (module_name, name) in self._names

    def _allows(self, thing: FunctionType | type) -> bool:
        return _is_top(thing) and self._has(thing.__module__, thing.__qualname__)


def _is_top(thing: FunctionType | type) -> bool:
    return "." not in thing.__qualname__ and thing.__qualname__ != "<lambda>"


def _refusal(name: str) -> RpcError:
    return RpcError(
        "this process does not let others call that",
        seen=name,
        fix="Name it, or the module in which it is defined, in init_rpc(allow=[...]).",
    )
