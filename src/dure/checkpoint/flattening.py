"""Nested state as one level of names, as torch names it: ``model.layers.0.weight``.

Dicts are always entered; lists where there is a tensor, a dict or a list of such in them. All else
is a value. A name is the path's keys and indices with dots between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from dure.errors import UsageError

__all__ = ["Index", "Leaf", "Path", "flatten", "nest", "put"]

Path = tuple[Any, ...]


class Index(int):
    """A key that is a place in a list, and no key of a dict."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or value in a nested state, and the keys that lead to it."""

    path: Path
    value: Any


def flatten(state: Mapping[Any, Any]) -> dict[str, Leaf]:
    """Return the leaves of a nested state by name.

    Raises:
        UsageError: Two have the same name.
    """
    found: dict[str, Leaf] = {}
    _enter((), state, found)
    return found


def _enter(path: Path, value: Any, found: dict[str, Leaf]) -> None:
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
    elif _is_value(value):
        name = ".".join(map(str, path))
        if name in found:
            raise UsageError(
                "two entries of a state have the same name",
                seen=f"{name!r} is {list(found[name].path)} and {list(path)}",
                fix="Let no key have a dot where the rest of the name is that of another.",
            )
        found[name] = Leaf(path, value)
        return
    else:
        items = ((Index(i), inner) for i, inner in enumerate(cast(list[Any], value)))
    for key, inner in items:
        _enter((*path, key), inner, found)


def _is_value(value: Any) -> bool:
    """Tell whether nothing in it is entered."""
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    return not any(
        isinstance(inner, torch.Tensor) or (isinstance(inner, Mapping | list) and _entered(inner))
        for inner in cast(list[Any], value)
    )


def _entered(value: Any) -> bool:
    return not _is_value(value)


def nest(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[Any, Any]:
    """Return what `flatten` was given: dicts and lists of the leaves.

    Args:
        flat: The leaves, by name.
        paths: The keys that led to a name, where they are not the name itself.
    """
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        *keys, last = paths.get(name, (name,))
        place = root
        for key in keys:
            place = place.setdefault(key, _Level())
        place[last] = value
    return {key: _listed(value) for key, value in root.items()}


class _Level(dict[Any, Any]):
    """A dict that `nest` has made, and no leaf."""


def _listed(value: Any) -> Any:
    """Return levels as dicts, or as lists where their keys are indices."""
    if not isinstance(value, _Level):
        return value
    if all(isinstance(key, Index) for key in value):
        return [_listed(value[key]) for key in sorted(value)]
    return {key: _listed(inner) for key, inner in value.items()}


def put(state: Any, path: Path, value: Any) -> None:
    """Put a value where a leaf of that path was."""
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = value
