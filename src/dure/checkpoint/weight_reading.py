"""What is in a folder of weights, as Hugging Face has them, and the checksums that Dure adds.

    model-00001-of-00002.safetensors, ...     complete tensors; model.safetensors if it is one file
    model.safetensors.index.json              {"metadata": {...}, "weight_map": {name: file}}

The weights of a folder are the files that the index names. Without an index they are
model.safetensors, or, without that, all files of safetensors. Hidden files are never read, nor are
files of a save that has not published them: its journal (`JOURNAL`) names those.

Dure's saves add checksums under the key "dure" to the metadata of the file whose rename publishes
the weights: the index, or model.safetensors. They are a JSON text:

    {"w": ["F32", [[offsets, sizes, crc32c], ...]], ...}

Each slice is consecutive bytes of its tensor, and each element is in one slice. A slice is checked
when it is read completely. Weights that other programs have written have no checksums.

"dure_version" in the metadata is the format of the checksums: 1, also if it is absent. "dure_needs"
names the releases that read it. Weights with checksums of a newer format are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import PurePath
from typing import Any, NamedTuple, cast

from dure.checkpoint.catalog import Unreadable
from dure.checkpoint.contents import Catalog, StoredFile, columns_of
from dure.checkpoint.file_systems import names_in, open_file, read_file
from dure.checkpoint.files import DTYPES, damaged, too_new
from dure.checkpoint.fsspec_path import AnyPath
from dure.checkpoint.slice_files import FileRecord, TensorKind
from dure.checkpoint.slices import Box, fault_of_cover, full_box
from dure.checkpoint.tree import tensor_node
from dure.comm.checksum import crc32c
from dure.errors import CheckpointError
from dure.trace.plain_files import parse_json

__all__ = [
    "HIDDEN",
    "INDEX",
    "JOURNAL",
    "KEY",
    "SINGLE",
    "VERSION",
    "catalog_of_weights",
    "cataloged",
    "checksums_of",
    "has_weights",
    "header_of",
    "indexed_files",
    "journaled",
]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HIDDEN = ".saving-"
JOURNAL = f"{HIDDEN}model.json"
"""A list of the files that a save is about to publish or to remove; absent otherwise."""
KEY = "dure"
"""The key of the checksums in the metadata."""
VERSION = 1
"""Of the checksums."""
_VERSION_KEY, _NEEDS_KEY, _NEEDS = "dure_version", "dure_needs", "dure>=0.2"
_MAX_HEADER_BYTES = 100_000_000
_NAMES = frozenset(DTYPES.values())


class _FileHeader(NamedTuple):
    """The header of a safetensors file."""

    data: bytes
    entries: dict[str, dict[str, Any]]
    metadata: dict[str, str]
    num_bytes: int
    """The length of the file."""


def catalog_of_weights(folder: AnyPath) -> Catalog:
    """Return what a folder of weights contains; reads the index and the files' headers.

    Links are followed, as the files of a download cache are links.

    Raises:
        CheckpointError: There are no weights, or a file is invalid.
    """
    try:
        return _catalog(folder)
    except (Unreadable, OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        seen = f"{type(e).__name__}: {e}; in {folder}"
        raise CheckpointError("the weights cannot be used", path=str(folder), seen=seen) from e


def has_weights(folder: AnyPath) -> bool:
    """Return whether a folder has an index, or files of weights."""
    try:
        return (folder / INDEX).exists() or bool(_files(folder))
    except OSError:
        return False


def _catalog(folder: AnyPath) -> Catalog:
    placed, metadata = _index(folder)
    files = _files(folder) if placed is None else sorted(set(placed.values()))
    if not files:
        raise Unreadable(f"there are no weights: no {INDEX} and no file of safetensors in {folder}")
    kinds: dict[str, TensorKind] = {}
    begins: dict[str, tuple[str, int]] = {}
    headers: dict[str, _FileHeader] = {}
    for file in files:
        path = (folder / file).resolve()
        header = headers[str(path)] = header_of(path)
        if placed is None and file == SINGLE:
            metadata = header.metadata
        for name, (kind, begin) in _tensors(path, header).items():
            if placed is not None and placed.get(name) != file:
                continue
            if name in kinds:
                raise Unreadable(f"{name!r} is in two files, one of them {file}")
            kinds[name], begins[name] = kind, (str(path), begin)
    missing = (placed or {}).keys() - kinds.keys()
    if missing:
        raise Unreadable(f"{min(missing)!r} is not in the file that {INDEX} names")
    text = _text_of(folder, metadata)
    records = {
        path: FileRecord(header.num_bytes, len(header.data), crc32c(header.data))
        for path, header in headers.items()
    }
    sums = None if text is None else _checksums(text, kinds)
    return cataloged(folder, kinds, begins, records, sums)


def cataloged(
    folder: AnyPath,
    kinds: dict[str, TensorKind],
    begins: Mapping[str, tuple[str, int]],
    records: Mapping[str, FileRecord],
    sums: Mapping[str, Mapping[Box, int]] | None,
) -> Catalog:
    """Build the catalog of weights: slices are those that have checksums, else complete tensors.

    Args:
        folder: The folder.
        kinds: The tensors.
        begins: The file of each, and where it begins there.
        records: The files.
        sums: The checksums of slices.
    """
    numbers = {path: number for number, path in enumerate(records)}
    catalog = Catalog(folder, {}, kinds, [StoredFile(*one) for one in records.items()], {})
    for name, kind in kinds.items():
        (path, begin), full = begins[name], full_box(kind.shape)
        found = dict[Box, int | None]({full: None} if full.num_elements else {})
        found = found if sums is None else dict(sums[name])
        runs = [cast(tuple[int, int], box.run_in(full)) for box in found]
        first, itemsize = begin - records[path].header_bytes, kind.torch_dtype.itemsize
        at = [first + run[0] * itemsize for run in runs]
        files = [numbers[path]] * len(found)
        catalog.columns[name] = columns_of(
            list(found), len(kind.shape), files, at, list(found.values())
        )
        catalog.tree[name] = tensor_node(name)
    text = repr((sorted(records.items()), sorted(catalog.columns.items())))
    return replace(catalog, digest=hashlib.sha256(text.encode()).digest())


def _index(folder: AnyPath) -> tuple[dict[str, str] | None, Mapping[str, Any]]:
    """Return the index, None if there is none, and its metadata."""
    path = folder / INDEX
    if not path.exists():
        return None, {}
    fields = cast(dict[str, Any], parse_json(read_file(path.resolve())))
    placed = cast(dict[str, str], fields["weight_map"])
    for file in placed.values():
        if PurePath(file).name != file:
            raise Unreadable(f"{INDEX} names {file!r}, which leaves the folder")
    return placed, cast(dict[str, Any], fields.get("metadata") or {})


def _text_of(folder: AnyPath, metadata: Mapping[str, Any]) -> str | None:
    """Return the text of the checksums in metadata; None: it has none.

    Raises:
        CheckpointTooNew: They are of a newer format.
        CheckpointDamaged: They are of a format that was never written.
    """
    version = str(metadata.get(_VERSION_KEY, VERSION))
    if KEY in metadata and version != str(VERSION):
        seen = f"the checksums of its weights are of format {version:.20}"
        if not version.isdecimal() or int(version) < VERSION:
            raise damaged(folder, seen)
        raise too_new(folder, seen, VERSION, metadata.get(_NEEDS_KEY))
    return metadata.get(KEY)


def indexed_files(folder: AnyPath) -> set[str] | None:
    """Return the files that the index of a folder names; None: there is no index.

    Raises:
        CheckpointError: The index cannot be used.
    """
    try:
        placed, _ = _index(folder)
    except (Unreadable, OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        seen = f"{type(e).__name__}: {e}; in {folder}"
        raise CheckpointError(f"{INDEX} cannot be used", path=str(folder), seen=seen) from e
    return None if placed is None else set(placed.values())


def _files(folder: AnyPath) -> list[str]:
    """Return the files of a folder without an index."""
    if (folder / SINGLE).exists():
        return [SINGLE]
    unpublished = journaled(folder)
    found = (name for name in names_in(folder) if name.endswith(".safetensors"))
    return sorted(name for name in found if name[0] != "." and name not in unpublished)


def journaled(folder: AnyPath) -> list[str]:
    """Return the files that the journal of a save names.

    A journal that is cut short names nothing: its save had not changed anything yet.
    """
    names: Any = []
    with suppress(FileNotFoundError, ValueError):
        names = parse_json(read_file(folder / JOURNAL))
    named = cast(list[Any], names if isinstance(names, list) else [])
    return [n for n in named if isinstance(n, str) and n == PurePath(n).name]


def header_of(path: AnyPath) -> _FileHeader:
    """Read the header of a file of safetensors.

    Raises:
        Unreadable, ValueError, OSError: It has none, or cannot be read.
    """
    with closing(open_file(path)) as file:
        size, length = file.num_bytes(), file.read(0, 8)
        count = int.from_bytes(length, "little")
        if len(length) < 8 or count > min(_MAX_HEADER_BYTES, size - 8):
            raise Unreadable(f"{path.name} has no header of safetensors")
        text = file.read(8, count)
    entries = cast(dict[str, dict[str, Any]], parse_json(text))
    metadata = cast(dict[str, str], entries.pop("__metadata__", {}))
    return _FileHeader(length + text, entries, metadata, size)


def _tensors(path: AnyPath, header: _FileHeader) -> dict[str, tuple[TensorKind, int]]:
    """Return the kind and the position of each tensor of a file."""
    found: dict[str, tuple[TensorKind, int]] = {}
    before = len(header.data)
    for name, entry in header.entries.items():
        if entry["dtype"] not in _NAMES:
            raise Unreadable(f"{name!r} in {path.name} is of an unknown dtype, {entry['dtype']!r}")
        kind = TensorKind(entry["dtype"], tuple(entry["shape"]))
        begin, end = entry["data_offsets"]
        numbers = [begin, end, *kind.shape]
        if not all(type(n) is int and n >= 0 for n in numbers) or end > header.num_bytes - before:
            raise Unreadable(f"{name!r} in {path.name} has invalid offsets")
        if end - begin != kind.num_bytes(full_box(kind.shape)):
            raise Unreadable(f"{name!r} in {path.name} has {end - begin} bytes, and is {kind}")
        found[name] = kind, before + begin
    return found


def checksums_of(
    kinds: Mapping[str, TensorKind], sums: Mapping[str, Mapping[Box, int]]
) -> dict[str, str]:
    """Return the checksums of tensors as metadata, whose length does not depend on them."""
    fields = {
        name: [kind.dtype, [[*box, f"{crc:08x}"] for box, crc in sums[name].items()]]
        for name, kind in kinds.items()
    }
    text = json.dumps(fields, separators=(",", ":"))
    return {KEY: text, _VERSION_KEY: str(VERSION), _NEEDS_KEY: _NEEDS}


def _checksums(text: Any, kinds: Mapping[str, TensorKind]) -> dict[str, dict[Box, int]]:
    """Return the checksums of all tensors; Unreadable: they are not of these tensors."""
    fields = cast(dict[str, Any], parse_json(text.encode()))
    _same(fields.keys() ^ kinds.keys())
    found: dict[str, dict[Box, int]] = {}
    for name, kind in kinds.items():
        dtype, slices = fields[name]
        boxes = {Box(tuple(at), tuple(size)): int(crc, 16) for at, size, crc in slices}
        runs = all(box.run_in(full_box(kind.shape)) for box in boxes)
        fits = dtype == kind.dtype and runs and not fault_of_cover(kind.shape, boxes)
        _same([] if fits and len(boxes) == len(slices) else [name])
        found[name] = boxes
    return found


def _same(others: Iterable[str]) -> None:
    for name in others:
        raise Unreadable(
            f"the checksums do not fit {name!r}: the files were changed. If another program wrote "
            f"them, remove {KEY!r} from the metadata of the index or the file"
        )
