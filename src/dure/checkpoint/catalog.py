"""The manifest of a sharded checkpoint: which slice of which tensor lies where, and all values.

It is written last, and put in its place by one rename: that is the commit. Until then the manifest
of the checkpoint before is there, and so are the files that it names, since every save takes names
of its own:

    manifest.json
    part-000002-00000.safetensors      of the folder's 2nd save, by rank 0

A manifest is believed where it is consistent: slices are within their tensors, each element is in
exactly one, and offsets and lengths are those that its files must have (see `slice_files.Layout`).
Files are compared with it when they are opened.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from dure.checkpoint import flattening as keys
from dure.checkpoint.folder import flush
from dure.checkpoint.manifest import NAME, Unreadable, read_sealed, write_sealed
from dure.checkpoint.slice_files import Kind, Layout, Slice
from dure.checkpoint.slices import Box, fault_of_cover

__all__ = ["Catalog", "Stored", "next_number", "part_name", "publish", "read_catalog", "remove"]

_FORMAT, _VERSION = "dure sharded checkpoint", 1
_PART = re.compile(r"part-(\d{6,})-(\d{5,})\.safetensors")
_HIDDEN = ".saving-manifest.json"


class Stored(NamedTuple):
    """Where a slice lies."""

    file: str
    crc32c: int | None
    """None: not known."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """What a sharded checkpoint consists of."""

    values: dict[str, Any]
    """What is no tensor, as `tree.encode` makes it, by name."""
    kinds: dict[str, Kind]
    slices: dict[str, dict[Box, Stored]]
    """Of each tensor; those without elements have none."""
    layouts: dict[str, Layout]
    """Of each file."""
    paths: dict[str, keys.Path] = field(default_factory=dict[str, keys.Path])
    """The keys that led to a name, where they are not the name itself."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            self.kinds[n].num_bytes(box) for n, boxes in self.slices.items() for box in boxes
        )

    def dump(self) -> dict[str, Any]:
        """Return JSON's types."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "values": self.values,
            "paths": {
                name: [[k] if isinstance(k, keys.Index) else k for k in path]
                for name, path in self.paths.items()
            },
            "tensors": {name: self._dump_tensor(name) for name in self.kinds},
        }

    def _dump_tensor(self, name: str) -> dict[str, Any]:
        kind = self.kinds[name]
        slices = [
            {
                "offsets": box.offsets,
                "sizes": box.sizes,
                "file": stored.file,
                "at": self.layouts[stored.file].begins[Slice(name, box)],
                "num_bytes": kind.num_bytes(box),
                "crc32c": stored.crc32c,
            }
            for box, stored in self.slices[name].items()
        ]
        return {"dtype": kind.dtype, "shape": kind.shape, "slices": slices}


def part_name(number: int, rank: int) -> str:
    """Return the name of the file that a rank writes in the folder's `number`-th save."""
    return f"part-{number:06d}-{rank:05d}.safetensors"


def next_number(folder: Path) -> int:
    """Return a number of which the folder has no file.

    Raises:
        OSError: The folder cannot be read.
    """
    found = [_PART.fullmatch(name) for name in os.listdir(folder)]
    return max((int(m[1]) for m in found if m), default=0) + 1


def publish(folder: Path, catalog: Catalog) -> None:
    """Make `catalog` that of the folder, durably; then remove the files that it does not name.

    Raises:
        OSError: It cannot be written; the folder's checkpoint is the one before.
    """
    hidden = folder / _HIDDEN
    hidden.unlink(missing_ok=True)
    write_sealed(hidden, catalog.dump())
    flush(folder)
    hidden.rename(folder / NAME)
    flush(folder)
    remove(folder, keep=catalog.layouts)


def remove(folder: Path, keep: Any = (), number: int | None = None) -> None:
    """Remove files of slices but those named in `keep`; with `number`, of that save only."""
    for name in os.listdir(folder):
        found = _PART.fullmatch(name)
        if found and name not in keep and number in (None, int(found[1])):
            with suppress(OSError):
                (folder / name).unlink()


def read_catalog(folder: Path) -> Catalog:
    """Read the manifest of a folder and check that it is consistent. No other file is read.

    Raises:
        Unreadable: It is absent, no file, damaged, of another format, or lies; the text says which.
    """
    return read_sealed(folder / NAME, _catalog)


def _catalog(fields: dict[str, Any]) -> Catalog:
    kind = fields.get("format"), fields.get("version")
    if kind != (_FORMAT, _VERSION):
        raise Unreadable(f"it is of format {kind[0]!r}, version {kind[1]!r}, not {_FORMAT!r}")
    kinds: dict[str, Kind] = {}
    slices: dict[str, dict[Box, Stored]] = {}
    claimed: dict[str, dict[Slice, tuple[int, int]]] = {}
    for name, tensor in cast(dict[str, dict[str, Any]], fields["tensors"]).items():
        kinds[name] = _kind(name, tensor)
        slices[name] = {}
        boxes: list[Box] = []
        for entry in cast(list[dict[str, Any]], tensor["slices"]):
            box = Box(_numbers(name, entry["offsets"]), _numbers(name, entry["sizes"]))
            boxes.append(box)
            stored = Stored(_file(name, entry["file"]), *_numbers(name, [entry["crc32c"]]))
            slices[name][box] = stored
            at, num_bytes = _numbers(name, [entry["at"], entry["num_bytes"]])
            claimed.setdefault(stored.file, {})[Slice(name, box)] = at, num_bytes
        fault = fault_of_cover(kinds[name].shape, boxes)
        if fault:
            raise Unreadable(f"of {name!r}, {fault}")
    layouts = {file: Layout.of(parts, kinds) for file, parts in claimed.items()}
    for file, parts in claimed.items():
        for part, claim in parts.items():
            true = layouts[file].begins[part], kinds[part.name].num_bytes(part.box)
            if claim != true:
                raise Unreadable(
                    f"{part.name}{part.box} is said to be {claim[1]} bytes at {claim[0]} of "
                    f"{file}, where it is {true[1]} at {true[0]}"
                )
    values = cast(dict[str, Any], fields["values"])
    both = values.keys() & kinds.keys()
    if both:
        raise Unreadable(f"{min(both)!r} is a tensor and a value")
    return Catalog(dict(values), kinds, slices, layouts, _paths(fields["paths"]))


def _paths(fields: dict[str, list[Any]]) -> dict[str, keys.Path]:
    found: dict[str, keys.Path] = {}
    for name, path in fields.items():
        found[name] = tuple(keys.Index(k[0]) if isinstance(k, list) else k for k in path)
        if not path or not all(isinstance(k, str | int) for k in found[name]):
            raise Unreadable(f"{path} are no keys that lead to {name!r}")
    return found


def _kind(name: str, tensor: dict[str, Any]) -> Kind:
    kind = Kind(str(tensor["dtype"]), _numbers(name, tensor["shape"]))
    try:
        assert kind.torch_dtype
    except KeyError:
        raise Unreadable(f"{name!r} is of an unknown dtype, {kind.dtype!r}") from None
    return kind


def _numbers(name: str, found: list[Any]) -> tuple[int, ...]:
    if not all(type(n) is int and n >= 0 for n in found):
        raise Unreadable(f"of {name!r}, {found} are no sizes or places")
    return tuple(found)


def _file(name: str, file: Any) -> str:
    if not isinstance(file, str) or not _PART.fullmatch(file):
        raise Unreadable(f"{name!r} is said to lie in {file!r}, which no part is called")
    return file
