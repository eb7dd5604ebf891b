"""Dataclasses in a state: an instance is stored as its fields, without its class.

It is loaded into an instance that the program has (`with_fields`), so no file decides what is
created; if the program has none, a dict is loaded, with a warning.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property
from types import MemberDescriptorType
from typing import Any, cast

import torch

from dure.errors import UsageError
from dure.trace import logs

__all__ = [
    "Fields",
    "fields_of",
    "is_of_fields",
    "is_within_itself",
    "item_at",
    "others_of",
    "with_fields",
    "with_instances",
    "within",
    "without_instance",
]

_log = logs.logger("checkpoint")

_NOT_OF_FIELDS = (
    *(Mapping, list, tuple, set, frozenset, torch.Tensor, torch.nn.Module, Enum, BaseException),
    *(int, float, complex, str, bytes, bytearray),
)
"""Subclasses of these have contents of their own, in addition to the fields of a dataclass."""


class Fields(dict[str, Any]):
    """The fields of a dataclass's instance, as they were saved."""


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass instance by name.

    None if it is not one, or has other attributes.
    """
    if not is_of_fields(value):
        return None
    names = [field.name for field in dataclasses.fields(value)]
    others = others_of(value)
    if others or not all(hasattr(value, name) for name in names):
        return None
    return {name: getattr(value, name) for name in names}


def is_of_fields(value: Any) -> bool:
    """Return whether a value is a dataclass instance without contents besides its fields."""
    named = getattr(type(value), "__dataclass_fields__", None)
    return named is not None and not isinstance(value, _NOT_OF_FIELDS)


def others_of(value: Any) -> list[str]:
    """Return the attributes of a dataclass instance that are not fields.

    Values that a `cached_property` keeps are left out, and what Python adds (`__orig_class__`).
    """
    kind: Any = type(value)
    fields = kind.__dataclass_fields__
    slots = [
        name
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType) and hasattr(value, name)
    ]
    names = dict.fromkeys([*getattr(value, "__dict__", {}), *slots])
    return [
        name
        for name in names
        if name not in fields
        and not (name.startswith("__") and name.endswith("__"))
        and not _is_cached(kind, name)
    ]


def _is_cached(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), cached_property)


def with_fields(instance: Any, values: Mapping[str, Any], copied: bool = False) -> Any:
    """Set fields of a dataclass's instance; return it. A frozen one is copied first.

    Args:
        instance: An instance of which `fields_of` returned the fields.
        values: The values of some of them.
        copied: Whether to leave the instance as it is, and return a copy.
    """
    if copied or type(instance).__dataclass_params__.frozen:
        instance = copy.copy(instance)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    attributes = getattr(instance, "__dict__", {})
    for name in attributes.keys() - type(instance).__dataclass_fields__.keys():
        if _is_cached(type(instance), name):  # of what the fields were
            del attributes[name]
    return instance


def is_within_itself(value: object, path: str) -> UsageError:
    """Return the error for an instance that refers to itself."""
    return UsageError(
        "a dataclass that refers to itself cannot be saved in a checkpoint",
        seen=f"{path} is the {type(value).__qualname__} that it is in",
        fix="Let the field be None in what is saved, and set it after loading.",
    )


def with_instances(saved: Any, found: Any, path: str) -> Any:
    """Return a saved state with instances of dataclasses in the place of `Fields`.

    Args:
        saved: The state. Dicts in it are changed.
        found: A state that has such instances where they were saved; they are copied.
        path: The name of the state.

    Raises:
        ValueError: An instance has other fields; the message names the path.
    """
    if isinstance(saved, dict):
        entries = cast(dict[Any, Any], saved)
        for key, value in entries.items():
            entries[key] = with_instances(value, item_at(found, key), within(path, key))
        if not isinstance(saved, Fields):
            return entries
        fields = fields_of(found)
        if fields is None:
            return without_instance(saved, path)
        if fields.keys() != saved.keys():
            raise ValueError(f"{path} has the fields {[*saved]} in the file, {[*fields]} here")
        return with_fields(found, saved, copied=True)
    if type(saved) in (list, tuple):
        items = enumerate(cast(Sequence[Any], saved))
        return type(saved)(
            [with_instances(v, item_at(found, n), within(path, n)) for n, v in items]
        )
    return saved


def without_instance(saved: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a dict of saved fields where the state has no instance, with a warning."""
    _log.warning(
        "%s was saved as a dataclass with the fields %s and is loaded as a dict: "
        "the state has no instance there.",
        path,
        ", ".join(saved),
    )
    return dict(saved)


def item_at(value: Any, key: Any) -> Any:
    """Return a container's item at a key, or None; nothing is added to a `defaultdict`."""
    if isinstance(value, Mapping):
        return cast(Mapping[Any, Any], value).get(key)
    if isinstance(value, list | tuple) and isinstance(key, int):
        items = cast(Sequence[Any], value)
        return items[key] if key < len(items) else None
    return (fields_of(value) or {}).get(key)


def within(path: str, key: object) -> str:
    """Return the path of a key of the value at `path`."""
    return f"{path}.{key}" if path else str(key)
