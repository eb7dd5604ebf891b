"""The manifest of a checkpoint: the state without its tensors, and which slice of which lies where.

One JSON file. It is written last, and put in its place by one rename: that is the commit. Until
then the manifest of the previous checkpoint is in place, with the files that it names, since every
save takes names of its own:

    manifest.json
    part-000002-00000.safetensors      of the folder's 2nd save, by rank 0

Formats of the manifest. All that were ever released can be read, and the newest is written:

    2   a line with the SHA-256 of the JSON text, then the text
    3   a JSON text whose first field is the SHA-256 of all bytes behind the digest

    {"sha256": "5f0c...", "format": "dure checkpoint", "version": 3, "needs": "dure>=0.2",
     "state": ..., "tensors": ...}

Format 1 was replaced before the first release. A later format begins with the same four fields, so
that this release can find it undamaged, and names the releases that read it.

A manifest is believed where it is consistent: slices are within their tensors, and each element is
in exactly one. Their places in files follow from the contents of these (`slice_files.Layout`),
and files are compared with that when they are opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from dure.checkpoint.files import read_file, readable, too_new
from dure.checkpoint.folder import Unflushed, check_link, flush, remove_hidden, replace_file
from dure.checkpoint.slice_files import FileLayout, Slice, TensorKind
from dure.checkpoint.slices import Box, fault_of_cover
from dure.checkpoint.tree import Leaf, Named, decode, flatten
from dure.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotWritten,
    CheckpointTooNew,
)
from dure.trace.plain_files import NotAFile, parse_json

__all__ = [
    "FORMAT",
    "NAME",
    "VERSION",
    "Catalog",
    "Manifest",
    "Published",
    "Stored",
    "Unreadable",
    "catalog_of",
    "clear",
    "leaves_of",
    "next_number",
    "not_shared",
    "part_name",
    "publish",
    "remove",
    "sealed",
    "tensor_text",
]

NAME = "manifest.json"
FORMAT, VERSION, _NEEDS = "dure checkpoint", 3, "dure>=0.2"
_OLDEST = 2
_HEAD, _DIGEST_BYTES = b'{"sha256": "', 64
_PART = re.compile(r"part-(\d{6,})-(\d{5,})\.safetensors")


class Stored(NamedTuple):
    """Where a slice lies."""

    file: str
    crc32c: int | None
    """None: not known."""


class Unreadable(Exception):
    """A manifest cannot be used; the text says why. Never leaves this package."""


@dataclass(frozen=True)
class Catalog:
    """What a checkpoint consists of."""

    tree: Any
    """The state as `tree.encode` makes it. In it are tensors' names, some maybe in two places."""
    kinds: dict[str, TensorKind]
    slices: dict[str, dict[Box, Stored]]
    """Of each tensor; those without elements have none."""
    layouts: dict[str, FileLayout]
    """Of each file."""

    @cached_property
    def leaves(self) -> dict[str, Leaf]:
        """Tensors, as `Named`, and values of the state by name."""
        return leaves_of(self.tree)

    def kind_of(self, name: str) -> TensorKind | None:
        """Return what the leaf of that name is; None: no tensor, or not there."""
        leaf = self.leaves.get(name)
        return self.kinds[leaf.value] if leaf and isinstance(leaf.value, Named) else None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            self.kinds[n].num_bytes(box) for n, boxes in self.slices.items() for box in boxes
        )

    def manifest(self) -> Manifest:
        """Return what is written of it."""
        files = {file: layout.num_bytes for file, layout in self.layouts.items()}
        return Manifest(self.tree, map(self._text, self.kinds), files)

    def _text(self, name: str) -> str:
        kind, slices = self.kinds[name], self.slices[name]
        columns = list(zip(*((*box.offsets, *box.sizes) for box in slices), strict=True))
        files = [stored.file for stored in slices.values()]
        return tensor_text(name, kind, columns, files, [s.crc32c for s in slices.values()])


class Manifest(NamedTuple):
    """What is written of a checkpoint."""

    tree: Any
    """As that of a `Catalog`."""
    tensors: Iterable[str]
    """What `tensor_text` returned for each tensor."""
    files: Mapping[str, int]
    """The length of each file."""


class Published(NamedTuple):
    """A manifest that is in its place."""

    digest: bytes
    unflushed: Unflushed | None
    """The error of the last flush, if that failed: the manifest is in place, but a power failure
    may bring back the previous one, whose files are kept."""


def tensor_text(
    name: str,
    kind: TensorKind,
    columns: Sequence[Sequence[int]],
    files: Sequence[str],
    sums: Iterable[int | None],
) -> str:
    """Return the entry of a tensor in the manifest, as JSON.

    Args:
        name: The tensor's.
        kind: The same.
        columns: For each dimension, where each slice begins; then its size in each dimension.
        files: The file of each slice.
        sums: The CRC-32C of each slice.
    """
    numbers = ", ".join(["%d"] * len(kind.shape))
    form = f'{{"offsets": [{numbers}], "sizes": [{numbers}], "file": "%s", "crc32c": %d}}'
    slices = ", ".join(map(form.__mod__, zip(*columns, files, sums, strict=True)))
    text = json.dumps({name: {"dtype": kind.dtype, "shape": kind.shape}})
    return f'{text[1:-2]}, "slices": [{slices}]}}'


def leaves_of(tree: Any) -> dict[str, Leaf]:
    """Return the leaves of a state by name, tensors as `Named`; errors as `flatten`, `decode`."""
    return flatten(decode(tree, Named))


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


def clear(folder: Path) -> None:
    """Remove what killed saves left: files that the manifest does not name.

    If the manifest cannot be used, nothing is removed, so that a person can look at the folder.

    Raises:
        OSError: The folder cannot be read or flushed.
    """
    remove_hidden(folder / NAME)
    names = os.listdir(folder)
    numbers = {int(found[1]) for found in map(_PART.fullmatch, names) if found}
    kept: Mapping[str, Any] = {}
    if NAME in names:
        if len(numbers) < 2:  # all files that a manifest names are of one save
            return
        try:
            kept = catalog_of(folder).layouts
        except CheckpointError:
            return
    if numbers:
        flush(folder)  # the manifest is durable before the files of the previous one are removed
        remove(folder, keep=kept)


def publish(
    folder: Path, manifest: Manifest, check: Callable[[], object] = lambda: None
) -> Published:
    """Make `manifest` that of the folder, durably; then remove the files that it does not name.

    Args:
        folder: The folder.
        manifest: Of the new checkpoint.
        check: Called at first, and right before the manifest is put in place; an error of it
            prevents that.

    Raises:
        CheckpointNotWritten: This rank does not find a file that another rank wrote.
        OSError: It cannot be written; the folder's checkpoint is the one before.
    """
    check()  # a job that has taken over may have removed the files
    _check_seen(folder, manifest.files)
    text = sealed(manifest)
    digest = bytes(text[len(_HEAD) : len(_HEAD) + _DIGEST_BYTES])
    try:
        replace_file(folder / NAME, text, check)
    except Unflushed as e:
        return Published(digest, e)
    with suppress(OSError):
        remove(folder, keep=manifest.files)
    return Published(digest, None)


def _check_seen(folder: Path, files: Mapping[str, int]) -> None:
    """Look for the files of all ranks: each host may have the folder on its own disk."""
    for file, num_bytes in files.items():
        try:
            size = (folder / file).lstat().st_size
        except FileNotFoundError:
            size = None
            if file in os.listdir(folder):  # makes a network file system read the folder again
                size = (folder / file).lstat().st_size
        if size != num_bytes:
            found = "is absent" if size is None else f"has {size} bytes, not {num_bytes}"
            raise not_shared(folder, f"{file}, which a rank has written, {found} on rank 0")


def not_shared(folder: Path, seen: str) -> CheckpointNotWritten:
    """Return the error for ranks that do not see the same folder."""
    return CheckpointNotWritten(
        "the ranks do not see the same folder",
        path=str(folder),
        seen=f"{seen}: {folder}",
        fix="Give a folder on a file system that all hosts mount.",
    )


def remove(
    folder: Path, keep: Any = (), number: int | None = None, rank: int | None = None
) -> None:
    """Remove files of slices that are not in `keep`; of one save, or of one rank, if given."""
    for name in os.listdir(folder):
        found = _PART.fullmatch(name)
        if not found or name in keep:
            continue
        if number in (None, int(found[1])) and rank in (None, int(found[2])):
            with suppress(OSError):
                (folder / name).unlink()


def catalog_of(folder: Path, digest: bytes | None = None) -> Catalog:
    """Read the manifest of a folder and check that it is consistent. No other file is read.

    Args:
        folder: The folder.
        digest: That of the manifest, if it must be a certain one.

    Raises:
        CheckpointDamaged: It is absent, not a file, damaged, not of Dure, or inconsistent.
        CheckpointTooNew: It is of a newer format.
        CheckpointError: It cannot be opened or read.
    """
    try:
        with readable(folder / NAME):
            return _read(folder, digest)
    except Unreadable as e:
        raise CheckpointDamaged(
            "the checkpoint cannot be used",
            path=str(folder),
            refused={str(folder): f"{e}"},
            seen=f"{e}; in {folder}",
        ) from None


def _read(folder: Path, digest: bytes | None) -> Catalog:
    try:
        content = read_file(folder / NAME)
    except FileNotFoundError:
        check_link(folder)
        raise Unreadable(_why_none(folder)) from None
    except NotAFile as e:
        raise Unreadable(f"{NAME} cannot be read: {e.strerror}") from None
    if digest is not None and not content.startswith(_HEAD + digest):
        raise CheckpointError(
            "a later save has replaced the checkpoint",
            path=str(folder),
            seen=f"{NAME} is another one than this save has written",
            fix="Look at what save() returned before the next save into the folder.",
        )
    try:
        fields = cast(dict[str, Any], parse_json(_unsealed(content)))
        _check_version(folder, fields)
        return _catalog(fields)
    except CheckpointTooNew:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RuntimeError) as e:
        raise Unreadable(f"{NAME} has another form: {type(e).__name__}: {e}") from None


def _why_none(folder: Path) -> str:
    """Return why there is no manifest in a folder."""
    if not folder.exists():
        return "there is no such folder"
    inner = sorted(path.parent.name for path in folder.glob(f"*/{NAME}"))
    if inner:
        return f"the folder has checkpoints in it: name one of them, such as {folder / inner[-1]}"
    if not any(folder.iterdir()):
        return "the folder is empty"
    if (folder / ".metadata").exists():
        return (
            "it is a checkpoint of torch.distributed.checkpoint: convert it with torch's "
            "dcp_to_torch_save, and save it with dure.checkpoint"
        )
    return f"there is no {NAME}: the folder is not a checkpoint, or was never finished"


def sealed(manifest: Manifest) -> bytearray:
    """Return the text of a manifest, of the format that is written."""
    fields = {
        "sha256": "0" * _DIGEST_BYTES,
        "format": FORMAT,
        "version": VERSION,
        "needs": _NEEDS,
        "state": manifest.tree,
    }
    text = bytearray(json.dumps(fields, allow_nan=False).encode()[:-1])
    text += b', "tensors": {'
    for number, tensor in enumerate(manifest.tensors):
        text += f"{', ' if number else ''}{tensor}".encode()
    text += b"}}"
    end = len(_HEAD) + _DIGEST_BYTES
    text[len(_HEAD) : end] = _digest(memoryview(text)[end:])
    return text


def _unsealed(content: bytes) -> bytes:
    """Return the JSON text of a manifest of any format, whose checksum is right."""
    end = len(_HEAD) + _DIGEST_BYTES
    if content.startswith(_HEAD):
        digest, sealed, text = content[len(_HEAD) : end], memoryview(content)[end:], content
    else:
        digest, _, text = content.partition(b"\n")
        sealed = memoryview(text)
    if digest != _digest(sealed):
        raise Unreadable(f"{NAME} is damaged, or not of Dure: its checksum is wrong")
    return text


def _digest(sealed: memoryview) -> bytes:
    return hashlib.sha256(sealed).hexdigest().encode()


def _check_version(folder: Path, fields: dict[str, Any]) -> None:
    name, version = fields.get("format"), fields.get("version")
    if name == FORMAT and type(version) is int and version > VERSION:
        raise too_new(folder, f"{NAME} is of format {version}", VERSION, fields.get("needs"))
    if name != FORMAT or version not in range(_OLDEST, VERSION + 1):
        raise Unreadable(
            f"it is of format {name!r}, version {version!r}, not {FORMAT!r}, "
            f"version {_OLDEST} to {VERSION}"
        )


def _catalog(fields: dict[str, Any]) -> Catalog:
    kinds: dict[str, TensorKind] = {}
    slices: dict[str, dict[Box, Stored]] = {}
    parts: dict[str, list[Slice]] = {}
    for name, tensor in cast(dict[str, dict[str, Any]], fields["tensors"]).items():
        kinds[name] = _kind(name, tensor)
        slices[name] = {}
        boxes: list[Box] = []
        for entry in cast(list[dict[str, Any]], tensor["slices"]):
            offsets, sizes, crc32c = entry["offsets"], entry["sizes"], entry["crc32c"]
            _numbers(name, [*offsets, *sizes, crc32c])
            box = Box(tuple(offsets), tuple(sizes))
            boxes.append(box)
            slices[name][box] = stored = Stored(_file(name, entry["file"]), crc32c)
            parts.setdefault(stored.file, []).append(Slice(name, box))
        fault = fault_of_cover(kinds[name].shape, boxes)
        if fault:
            raise Unreadable(f"of {name!r}, {fault}")
    layouts = {file: FileLayout.of(lying, kinds) for file, lying in parts.items()}
    if not isinstance(fields["state"], dict):
        raise Unreadable(f"{NAME} is of no state")
    catalog = Catalog(fields["state"], kinds, slices, layouts)
    for name, leaf in catalog.leaves.items():
        if isinstance(leaf.value, Named) and leaf.value not in kinds:
            raise Unreadable(f"{NAME} has no tensor {leaf.value!r}, which {name!r} is said to be")
    return catalog


def _kind(name: str, tensor: dict[str, Any]) -> TensorKind:
    kind = TensorKind(str(tensor["dtype"]), _numbers(name, tensor["shape"]))
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
        raise Unreadable(f"{name!r} is said to be in {file!r}, which is not the name of a part")
    return file
