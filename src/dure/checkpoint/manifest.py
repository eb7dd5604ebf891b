"""The manifest: what a checkpoint consists of. It is written last, and its presence is the promise.

One JSON file: the state of all objects without their tensors (see `tree`), each rank's own state,
and for each part the tensors in it with their checksums. The first line is the SHA-256 of the rest.
So a checkpoint is whole if the manifest is, and if every part is what the manifest says.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from dure.checkpoint.opening import read_file
from dure.checkpoint.parts import Entry

__all__ = [
    "NAME",
    "Manifest",
    "Unreadable",
    "read_manifest",
    "read_sealed",
    "write_manifest",
    "write_sealed",
]

T = TypeVar("T")

NAME = "manifest.json"
_FORMAT, _VERSION = "dure checkpoint", 1
_PART = re.compile(r"part-\d+\.safetensors")


class Unreadable(Exception):
    """A manifest cannot be used; the text says why. Never leaves this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of.

    `objects` are the trees that all ranks share; `ranks` those of each rank's own, in rank order;
    `parts` maps the name of a file to its tensors, in file order.
    """

    step: int
    objects: dict[str, Any]
    ranks: list[dict[str, Any]]
    parts: dict[str, list[Entry]]

    @property
    def world_size(self) -> int:
        """Ranks of the job that saved."""
        return len(self.ranks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(e.num_bytes for entries in self.parts.values() for e in entries)

    def entry_of(self) -> dict[str, Entry]:
        """Map each tensor's name to its entry."""
        return {e.name: e for entries in self.parts.values() for e in entries}


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest to a new file, through to the disk.

    Raises:
        OSError: It cannot be written.
    """
    write_sealed(
        path,
        {
            "format": _FORMAT,
            "version": _VERSION,
            "step": manifest.step,
            "objects": manifest.objects,
            "ranks": manifest.ranks,
            "parts": {n: [e.dump() for e in part] for n, part in manifest.parts.items()},
        },
    )


def write_sealed(path: Path, fields: dict[str, Any]) -> None:
    """Write JSON to a new file, behind a line with its SHA-256, through to the disk.

    Raises:
        OSError: It cannot be written.
    """
    body = json.dumps(fields, allow_nan=False).encode()
    with path.open("xb") as file:
        file.write(_digest(body) + b"\n" + body)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and check it.

    Raises:
        Unreadable: It is absent, damaged, or of another format; the text says which.
    """
    return read_sealed(path, _manifest)


def read_sealed(path: Path, form: Callable[[dict[str, Any]], T]) -> T:
    """Read what `write_sealed` wrote, and return what `form` makes of it.

    Raises:
        Unreadable: It is absent, no file, damaged, or of another form; the text says which.
    """
    try:
        digest, _, body = read_file(path).partition(b"\n")
    except FileNotFoundError:
        raise Unreadable(f"there is no {path.name}: it was never finished") from None
    except OSError as e:
        raise Unreadable(f"{path.name} cannot be read: {e.strerror}") from None
    if digest != _digest(body):
        raise Unreadable(f"{path.name} is damaged, or not of Dure: its checksum is wrong")
    try:
        return form(cast(dict[str, Any], json.loads(body)))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise Unreadable(f"{path.name} has another form: {type(e).__name__}: {e}") from None


def _manifest(fields: dict[str, Any]) -> Manifest:
    kind = fields.get("format"), fields.get("version")
    if kind != (_FORMAT, _VERSION):
        raise Unreadable(f"it is of format {kind[0]!r}, version {kind[1]!r}, and not {_VERSION}")
    parts = cast(dict[str, list[dict[str, Any]]], fields["parts"])
    for name in parts:
        if not _PART.fullmatch(name):
            raise Unreadable(f"a part has a name that no part has: {name!r}")
    ranks = cast(list[Any], fields["ranks"])
    if not ranks or not all(isinstance(own, dict) for own in ranks):
        raise Unreadable("it is of no rank")
    return Manifest(
        step=int(fields["step"]),
        objects=dict(fields["objects"]),
        ranks=list(ranks),
        parts={name: [Entry.load(e) for e in entries] for name, entries in parts.items()},
    )


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
