"""What others may call here, where a program says so: `init_rpc(allow=[...])`.

A list has functions, classes and modules. A module allows the functions and classes that are
*defined* in it, and not what it has imported. With a list, a message may name nothing else: neither
what is called, nor what unpickling looks up on the way, but for plain values (`_VALUES`). Names
with dots reach into classes and so around the list: a method is allowed with its class, and is
called on an object that came with the message or lies here (`method`).

Without a list every process of the job may call everything, as its processes trust each other.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

from dure.errors import RpcError, UsageError

__all__ = ["Allowed"]

_VALUES = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice"},
    "collections": {"OrderedDict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "dure.rpc.message": {"_reference", "_tensor"},
    "dure.rpc.names": {"WorkerInfo"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {"Size", "device"},
    "uuid": {"UUID"},
}
"""Names that make plain values, and run nothing of the program's."""

_OWN = {
    "dure.rpc.optimizer": {"_make", "_step"},
    "dure.rpc.profiling": {"profiled"},
    "dure.rpc.remote_module": {"_forward", "_make", "_parameters", "_train"},
    "dure.rpc.rref": {"call_method", "run_backward", "value_type"},
    "dure.rpc.termination": {"enter", "report"},
}
"""What RPC itself calls; what of the program's they run must be on the list itself.

They are called by name, and named by no pickle: what they return is for who calls them, and could
be called on in a pickle (`value_type` of a reference).
"""

_AGAIN = {"dure.rpc.remote_module": {"_again"}}
"""The one that pickles name."""


class Allowed:
    """A list of what may be called.

    Args:
        things: Functions, classes and modules.

    Raises:
        UsageError: One of them is none of these, or cannot be told by name: a lambda, a partial, a
            bound method, a function within a function, a builtin.
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
        """Look up what a message calls.

        Raises:
            RpcError: It is not on the list.
        """
        if name in _OWN.get(module_name, ()):
            return getattr(importlib.import_module(module_name), name)
        return self.find(module_name, name)

    def find(self, module_name: str, name: str) -> Any:
        """Look up what a message names; for unpickling.

        Raises:
            RpcError: It is not on the list.
        """
        if name in _VALUES.get(module_name, ()) or name in _AGAIN.get(module_name, ()):
            return getattr(importlib.import_module(module_name), name)
        if "." not in name and self._has(module_name, name):
            found = getattr(importlib.import_module(module_name), name, None)
            if isinstance(found, FunctionType | type) and self._allows(found):
                return found
        if module_name == "torch" and _is_constant(name):
            return getattr(importlib.import_module("torch"), name)
        if module_name == "builtins" and (error := _builtin_error(name)) is not None:
            return error
        raise _refusal(f"{module_name}.{name}")

    def check(self, function: Callable[..., Any]) -> None:
        """Refuse what is not on the list, though it has been unpickled.

        Raises:
            RpcError: It is not on the list.
        """
        target: Any = function
        if isinstance(function, FunctionType) and function.__name__ in _OWN.get(
            function.__module__, ()
        ):
            return
        if inspect.ismethod(function):  # of an object, or a classmethod
            owner = function.__self__
            target = owner if isinstance(owner, type) else type(owner)
        if not (isinstance(target, FunctionType | type) and self._allows(target)):
            raise _refusal(_name(function))

    def method(self, owner: object, name: str) -> Callable[..., Any]:
        """Return a method of an object that lies here, if its class is on the list.

        Raises:
            RpcError: It is not, or it has no such method; names with underscores are not called.
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


def _name(thing: object) -> str:
    module = getattr(thing, "__module__", type(thing).__module__)
    return f"{module}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _is_constant(name: str) -> bool:
    """Whether it is a dtype, a layout or a memory format of torch."""
    torch = importlib.import_module("torch")
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    return isinstance(getattr(torch, name, None), kinds)


def _builtin_error(name: str) -> type | None:
    found = getattr(importlib.import_module("builtins"), name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _refusal(name: str) -> RpcError:
    return RpcError(
        "this process does not let others call that",
        seen=name,
        fix="Name it, or the module in which it is defined, in init_rpc(allow=[...]).",
    )
