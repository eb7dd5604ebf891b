"""Loading a dict or a list in place: the containers and tensors in it get the saved values.

A dict may hold a module's parameters, a list averaged weights. Other objects refer to these
tensors, too, so elements are copied into them; dicts and lists inside are filled the same way.
So are the fields of dataclasses; a frozen instance is replaced by a copy.
Everything else is replaced: values, and tensors that are missing or empty. Keys and items that were
not saved are removed. Fields must be those in the file. If a dict was returned by a module's
`state_dict()`, its names must be those in the file, as for the module.

If one tensor or container is in two places, and two different ones were saved there, the first
place is filled, and the second gets a new object.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch

from dure.checkpoint.dataclass_fields import (
    Fields,
    fields_of,
    item_at,
    with_fields,
    without_instance,
)
from dure.checkpoint.slice_files import TensorKind, kind_of
from dure.checkpoint.slices import full_box, pieces_of
from dure.checkpoint.tree import Named, decode
from dure.tensor import DTensor

__all__ = ["fill", "unlike"]


def unlike(found: Any, saved: Any) -> list[str]:
    """Return the reasons why a dict or list cannot be filled with what was saved.

    Args:
        found: The dict or list.
        saved: The saved state, with a `TensorKind` for each tensor.

    Raises:
        UsageError: A tensor in it holds no values, or is not dense.
    """
    kinds = [dict if isinstance(value, dict) else type(value) for value in (found, saved)]
    if kinds[0] is not kinds[1] and not isinstance(found, kinds[1]):
        return [f"it is a {kinds[1].__name__} in the file, a {kinds[0].__name__} here"]
    return list(_differences(found, saved, ""))


def _differences(found: Any, saved: Any, path: str) -> Iterator[str]:
    if isinstance(found, torch.Tensor):
        if _has_memory(found):
            pieces_of(path, found)  # refuses tensors without values
            here = kind_of(found) or found.dtype
            if isinstance(saved, TensorKind) and saved != here:
                yield f"{path} is {saved} in the file, {here} here"
        return
    keys: Iterable[Any] = ()
    if isinstance(found, dict):
        keys = cast(dict[Any, Any], found)
    elif isinstance(found, list | tuple):
        keys = range(len(cast(Sequence[Any], found)))
    elif isinstance(saved, dict) and (fields := fields_of(found)) is not None:
        keys, names = fields, cast(dict[Any, Any], saved).keys()
        for name in sorted(fields.keys() ^ names, key=str):
            yield f"{path}.{name} is {'not in the file' if name in fields else 'in the file only'}"
    for key in keys:
        inner = f"{path}.{key}" if path else str(key)
        yield from _differences(item_at(found, key), item_at(saved, key), inner)
        needed = hasattr(found, "_metadata") and isinstance(item_at(found, key), torch.Tensor)
        if needed and not isinstance(item_at(saved, key), TensorKind):
            yield f"{inner} is not in the file"
    if hasattr(found, "_metadata") and isinstance(saved, dict):
        for key, kind in cast(dict[Any, Any], saved).items():
            if isinstance(kind, TensorKind) and key not in found:
                yield f"{path}.{key} is in the file only" if path else f"{key} is in the file only"


def fill(found: Any, tree: Any, tensor_of: Callable[[str], torch.Tensor]) -> None:
    """Put a saved state into the dict or list `found`.

    Args:
        found: A dict or list for which `unlike` returned nothing.
        tree: The state as it was encoded.
        tensor_of: Returns the tensor of a name. Its memory stays as it is.
    """
    _Filling(tensor_of).filled(found, decode(tree, Named, Fields))


class _Filling:
    def __init__(self, tensor_of: Callable[[str], torch.Tensor]) -> None:
        self._tensor_of = tensor_of
        self._copies: dict[str, torch.Tensor] = {}
        self._from: dict[Hashable, str] = {}
        self._entered: dict[int, Any] = {}
        """By id; the containers themselves are kept, so that no other gets the same id."""

    def filled(self, found: Any, saved: Any, path: str = "") -> Any:
        """Return `found`, filled, or the object that replaces it."""
        if isinstance(saved, Named):
            return self._tensor(found, saved)
        if isinstance(saved, dict):
            entries = cast(dict[Any, Any], saved)
            if fields_of(found) is not None:
                values = self._all_filled(found, entries.items(), path)
                return with_fields(found, values, copied=not self._enters(found, object))
            if isinstance(saved, Fields):
                entries = saved = without_instance(saved, path)
            into = cast(dict[Any, Any], found if self._enters(found, dict) else saved)
            made = self._all_filled(found, entries.items(), path)
            into.clear()
            into.update(made)
            return into
        if isinstance(saved, list | tuple) and type(saved) is not torch.Size:
            inners = enumerate(cast(Sequence[Any], saved))
            items = [*self._all_filled(found, inners, path).values()]
            if isinstance(saved, tuple):
                return tuple(items)
            into = cast(list[Any], found if self._enters(found, list) else saved)
            into[:] = items
            return into
        return saved

    def _all_filled(
        self, found: Any, entries: Iterable[tuple[Any, Any]], path: str
    ) -> dict[Any, Any]:
        return {
            key: self.filled(item_at(found, key), inner, f"{path}.{key}" if path else str(key))
            for key, inner in entries
        }

    def _enters(self, found: Any, kind: type) -> bool:
        """Return whether `found` is a container of that type that was not filled before."""
        if not isinstance(found, kind) or id(found) in self._entered:
            return False
        self._entered[id(found)] = found
        return True

    def _tensor(self, found: Any, name: str) -> torch.Tensor:
        saved = self._tensor_of(name)
        fits = isinstance(found, torch.Tensor) and _has_memory(found)
        if not fits or self._from.setdefault(_memory(found), name) != name:
            if name not in self._copies:  # one tensor saved in two places is one again
                self._copies[name] = saved.clone()
            return self._copies[name]
        full = full_box(saved.shape)
        with torch.no_grad(), torch.inference_mode(found.is_inference()):
            for piece in pieces_of(name, found):
                piece.memory.copy_(saved[piece.box.within(full)])
        return found


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements, each at its own address."""
    if tensor.layout != torch.strided:
        return True
    places = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and all(n == 1 or stride for n, stride in places)


def _memory(tensor: torch.Tensor) -> Hashable:
    """Return where the elements of a tensor are."""
    held = tensor.part if isinstance(tensor, DTensor) else tensor
    return held.data_ptr(), held.device, held.shape, held.stride() if held.numel() else id(tensor)
