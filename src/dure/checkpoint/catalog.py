"""The manifest of a checkpoint: the state without its tensors, and where the slices of each are.

One JSON file. It is written last, and put in its place by one rename: that is the commit. Until
then the manifest of the previous checkpoint is in place, with the files that it names, since every
save takes names of its own:

    manifest.json
    part-000002-00000.safetensors      of the folder's 2nd save, by rank 0

Formats of the manifest. All that were ever released can be read, and the newest is written:

    2   a line with the SHA-256 of the JSON text, then the text
    3   a JSON text whose first field is the SHA-256 of all bytes behind the digest
    4   as 3; slices are columns of numbers, and their checksums are in the headers of their files

    {"sha256": "5f0c...", "format": "dure checkpoint", "version": 4, "needs": "dure>=0.2",
     "state": ...,
     "files": {"save": 2, "id": "9d41...", "ranks": [[0, 1, 256]], "bytes": [[4352, 0, 256]],
               "headers": [[256, 0, 256]], "crc32c": "e0837cb1..."},
     "tensors": {"w": {"dtype": "F32", "shape": [1024, 256],
                       "offsets": [[[0, 4, 256]], [[0, 0, 256]]],
                       "sizes": [[[4, 0, 256]], [[256, 0, 256]]], "files": [[0, 1, 256]],
                       "begins": [[0, 0, 256]], "places": [[0, 0, 256]]}, ...}}

Each column has one number per slice, or per file, as runs (`runs`): offsets and sizes by dimension,
numbers of files, where slices begin behind their file's header, and which of its checksums is
theirs (`slice_files`). "id" are 16 random bytes of the save, which are in each of its files, too.
"crc32c" has eight digits per file: the CRC-32C of its header. So a manifest of format 4 grows with
the number of tensors, and by 8 bytes per rank, as long as slices are cut regularly. Checksums and
all else that grows with both are in the files, of which a load reads only those that it needs.

Format 1 was replaced before the first release. A later format begins with the same four fields, so
that this release can find it undamaged, and names the releases that read it.

A manifest is believed where it is consistent: slices are within their tensors, and each element is
in exactly one. In formats 2 and 3 the places of slices follow from the contents of their files
(`slice_files.FileLayout`). Files are compared with their manifest when they are opened.
"""

from __future__ import annotations

import hashlib
import json
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, cast, overload

import numpy as np

from dure.checkpoint.contents import Catalog, Columns, StoredFile, columns_of
from dure.checkpoint.file_systems import file_system_of, names_in, open_file, read_file
from dure.checkpoint.files import MANIFEST, readable, too_new
from dure.checkpoint.fsspec_path import AnyPath
from dure.checkpoint.local_files import Unflushed
from dure.checkpoint.runs import column_of, runs_of
from dure.checkpoint.slice_files import FileLayout, FileRecord, Slice, TensorKind, file_id
from dure.checkpoint.slices import Box
from dure.checkpoint.tree import Named
from dure.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotWritten,
)
from dure.trace.plain_files import NotAFile, parse_json

__all__ = [
    "FORMAT",
    "NAME",
    "VERSION",
    "HeldManifest",
    "Manifest",
    "Published",
    "Unreadable",
    "catalog_of",
    "clear",
    "clear_save",
    "next_number",
    "not_shared",
    "part_name",
    "publish",
    "remove",
    "sealed",
    "unless_changed",
]

NAME = MANIFEST
FORMAT, VERSION, _NEEDS = "dure checkpoint", 4, "dure>=0.2"
_OLDEST, _COLUMNS = 2, 4
_FIELDS = ("offsets", "sizes", "files", "begins", "places")
_HELD_BYTES = 1 << 16
_HEAD, _DIGEST_BYTES = b'{"sha256": "', 64
_OTHER_FORM = (*(ValueError, LookupError, TypeError, AttributeError, OverflowError, RuntimeError),)
"""Errors of reading fields that are of another form."""
_PART = re.compile(r"part-(\d{6,})-(\d{5,})\.safetensors")


class Unreadable(Exception):
    """A manifest cannot be used; the text says why. Never leaves this package."""


class Manifest(NamedTuple):
    """What is written of a checkpoint."""

    tree: Any
    """As that of a `Catalog`."""
    number: int
    """Which save of the folder it is."""
    id: str
    """The save's identity, which its files have (`slice_files.new_save_id`)."""
    written: Mapping[int, FileRecord]
    """By rank, ascending: the file of each that has written one."""
    tensors: str
    """A JSON object: for each tensor, its kind and the columns of its slices."""

    @property
    def files(self) -> dict[str, int]:
        """The length of each file, by name."""
        written = self.written.items()
        return {part_name(self.number, rank): record.num_bytes for rank, record in written}


class Published(NamedTuple):
    """A manifest that is in its place."""

    digest: bytes
    unflushed: Unflushed | None
    """The error of the last flush, if that failed: the manifest is in place, but a power failure
    may bring back the previous one, whose files are kept."""


def part_name(number: int, rank: int) -> str:
    """Return the name of the file that a rank writes in the folder's `number`-th save."""
    return f"part-{number:06d}-{rank:05d}.safetensors"


def next_number(folder: AnyPath) -> int:
    """Return a number of which the folder has no file, and which no manifest there has had.

    Raises:
        OSError: The folder cannot be read.
    """
    numbers = {int(found[1]) for found in map(_PART.fullmatch, names_in(folder)) if found}
    return file_system_of(folder).number_after(max({_number_in(folder) or 0, *numbers}))


def clear(folder: AnyPath) -> None:
    """Remove what killed saves left: files of other saves than that of the manifest.

    If the manifest cannot be used, nothing is removed, so that a person can look at the folder.

    Raises:
        OSError: The folder cannot be read or flushed.
    """
    files = file_system_of(folder)
    files.remove_hidden(folder / NAME)
    found = {name: _PART.fullmatch(name) for name in files.names(folder)}
    numbers = {name: int(match[1]) for name, match in found.items() if match}
    number = _number_in(folder)
    kept = {name for name in numbers if numbers[name] == number}
    if number is None or kept == numbers.keys():
        return
    files.flush(folder)  # the manifest is durable before files of the previous one are removed
    remove(folder, keep=kept)


def clear_save(folder: AnyPath, number: int) -> None:
    """Remove what a save that failed has written, unless its manifest is in place.

    The rename of its manifest, or its upload, may have taken effect and be reported as an error. So
    the manifest is read: if it cannot be used, nothing is removed.

    Raises:
        OSError: The folder cannot be read.
    """
    if _number_in(folder) not in (None, number):
        remove(folder, number=number)


def _number_in(folder: AnyPath) -> int | None:
    """Return which save of the folder the manifest is of; 0: there is none, None: it is unusable.

    All files that it names are of that save. It may name none.

    Raises:
        OSError: The folder cannot be read.
    """
    try:
        text, digest = _unsealed(read_file(folder / NAME))
        fields = cast(dict[str, Any], parse_json(text))
        _check_version(folder, fields)
        if fields["version"] >= _COLUMNS:
            return int(fields["files"]["save"])
        names = [file.name for file in _catalog(folder, fields, digest).files]
        return max([int(found[1]) for found in map(_PART.fullmatch, names) if found], default=0)
    except FileNotFoundError:
        return None if NAME in names_in(folder) else 0
    except (OSError, Unreadable, CheckpointError, *_OTHER_FORM):
        return None


def publish(
    folder: AnyPath,
    manifest: Manifest,
    check: Callable[[], object] = lambda: None,
    is_new: bool = False,
) -> Published:
    """Make `manifest` that of the folder, durably; then remove the files that it does not name.

    Args:
        folder: The folder.
        manifest: Of the new checkpoint.
        check: Called right before the manifest is put in place, before files are removed, and if a
            file is absent; an error of it prevents that.
        is_new: Whether this save has made the folder, which has no other files.

    Raises:
        CheckpointNotWritten: This rank does not find a file that another rank wrote.
        OSError: It cannot be written; the folder's checkpoint is the one before.
    """
    files = manifest.files
    try:
        _check_seen(folder, files)
    except (CheckpointNotWritten, OSError):
        check()  # a job that has taken over may have removed the files
        raise
    text = sealed(manifest)
    digest = bytes(text[len(_HEAD) : len(_HEAD) + _DIGEST_BYTES])
    try:
        file_system_of(folder).replace(folder / NAME, text, check)
    except Unflushed as e:
        return Published(digest, e)
    if not is_new:
        with suppress(OSError):
            remove(folder, keep=files, check=check)
    return Published(digest, None)


def _check_seen(folder: AnyPath, files: Mapping[str, int]) -> None:
    """Look for the files of all ranks: each host may have the folder on its own disk."""
    for file, num_bytes in files.items():
        try:
            size = file_system_of(folder).size(folder / file)
        except FileNotFoundError:
            size = None
            if file in names_in(folder):  # makes a network file system read the folder again
                size = file_system_of(folder).size(folder / file)
        if size != num_bytes:
            found = "is absent" if size is None else f"has {size} bytes, not {num_bytes}"
            raise not_shared(folder, f"{file}, which a rank has written, {found} on rank 0")


def not_shared(folder: AnyPath, seen: str) -> CheckpointNotWritten:
    """Return the error for ranks that do not see the same folder."""
    return CheckpointNotWritten(
        "the ranks do not see the same folder",
        path=str(folder),
        seen=f"{seen}: {folder}",
        fix="Give a folder on a file system that all hosts mount.",
    )


def remove(
    folder: AnyPath,
    keep: Any = (),
    number: int | None = None,
    rank: int | None = None,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Remove files of slices.

    Args:
        folder: The folder.
        keep: Names of files that stay.
        number: Of the save whose files are removed; None: of all.
        rank: The rank whose files are removed; None: of all.
        check: Called when the files are known, before any is removed; an error of it prevents that.
            A job that has taken over by then may have added files before they were listed.

    Raises:
        OSError: The folder cannot be read.
    """
    found = {name: _PART.fullmatch(name) for name in names_in(folder) if name not in keep}
    check()
    for name, match in found.items():
        if match and number in (None, int(match[1])) and rank in (None, int(match[2])):
            with suppress(OSError):
                (folder / name).unlink()


def catalog_of(folder: AnyPath) -> Catalog:
    """Read the manifest of a folder and check that it is consistent. No other file is read.

    Raises:
        CheckpointDamaged: It is absent, not a file, damaged, not of Dure, or inconsistent.
        CheckpointTooNew: It is of a newer format.
        CheckpointError: It cannot be opened or read.
    """
    with _refused(folder), readable(folder / NAME):
        try:
            content = read_file(folder / NAME)
        except FileNotFoundError:
            file_system_of(folder).check_link(folder)
            raise Unreadable(_why_none(folder)) from None
        except NotAFile as e:
            raise Unreadable(f"{NAME} cannot be read: {e.strerror}") from None
        return _parsed(folder, content)


@contextmanager
def unless_changed(catalog: Catalog) -> Iterator[None]:
    """Raise another error if a save has removed or replaced the checkpoint since it was opened.

    Args:
        catalog: The checkpoint's, with a digest if it is of a manifest.

    Raises:
        CheckpointError: A file is absent or another one, and the manifest is no longer that one.
        CheckpointDamaged: As it was raised; the manifest is as it was.
    """
    try:
        yield
    except CheckpointDamaged as e:
        change = _change_of(catalog)
        if change is None:
            raise
        raise CheckpointError(
            f"the checkpoint was {change} while it was read",
            path=str(catalog.folder),
            seen=e.seen,
            fix="Load again: another job, or another thread, saves there.",
        ) from e


def _change_of(catalog: Catalog) -> str | None:
    """Return how a manifest has changed since it was read; None: not at all, or it is not known."""
    if len(catalog.digest) != _DIGEST_BYTES:  # of another form of checkpoints
        return None
    try:
        front = file_system_of(catalog.folder).open(catalog.folder / NAME)
        try:
            found = front.read(0, len(_HEAD) + _DIGEST_BYTES)
        finally:
            front.close()
    except FileNotFoundError:
        return "removed"
    except OSError:
        return None
    digest = found[len(_HEAD) :] if found.startswith(_HEAD) else found[:_DIGEST_BYTES]
    return None if digest == catalog.digest else "replaced"


class HeldManifest:
    """The manifest that a save has written, which can be read after later saves have replaced it.

    Up to 64 KiB are read at once. A longer file is kept open until this object is freed. A store
    keeps no file open: there a longer manifest can be read until a later save replaces it.

    Args:
        folder: The folder.
        digest: That of the manifest.
    """

    def __init__(self, folder: AnyPath, digest: bytes) -> None:
        self._folder, self._digest = folder, digest
        self._begin, self._file = b"", None
        with suppress(OSError):
            file = open_file(folder / NAME)
            close = weakref.finalize(self, file.close)
            close.atexit = False
            self._begin, self._file = file.read(0, _HELD_BYTES), file
            if len(self._begin) < _HELD_BYTES:
                close()
                self._file = None

    def catalog(self) -> Catalog:
        """Return what the manifest has.

        Raises:
            CheckpointError: This rank did not see it when it was written, or it cannot be read now.
        """
        with _refused(self._folder), readable(self._folder / NAME):
            content, file = self._begin, self._file
            if file is not None and content.startswith(_HEAD + self._digest):
                content = file.read(0, file.num_bytes())
            if not content.startswith(_HEAD + self._digest):
                raise CheckpointError(
                    "what was saved cannot be read",
                    path=str(self._folder),
                    seen=f"after the save {NAME} was not the one that was written: {self._folder}",
                    fix="Read the folder with FileSystemReader(folder).read_metadata().",
                )
            return _parsed(self._folder, content)


@contextmanager
def _refused(folder: AnyPath) -> Iterator[None]:
    """Convert `Unreadable` to CheckpointDamaged."""
    try:
        yield
    except Unreadable as e:
        raise CheckpointDamaged(
            "the checkpoint cannot be used",
            path=str(folder),
            refused={str(folder): f"{e}"},
            seen=f"{e}; in {folder}",
        ) from None


def _parsed(folder: AnyPath, content: bytes) -> Catalog:
    try:
        text, digest = _unsealed(content)
        fields = cast(dict[str, Any], parse_json(text))
        _check_version(folder, fields)
        return _catalog(folder, fields, digest)
    except CheckpointError:
        raise
    except _OTHER_FORM as e:
        raise Unreadable(f"{NAME} has another form: {type(e).__name__}: {e}") from None


def _why_none(folder: AnyPath) -> str:
    """Return why there is no manifest in a folder."""
    if not folder.exists():
        return "there is no such folder"
    names = names_in(folder)
    inner = sorted(name for name in names if (folder / name / NAME).exists())
    if inner:
        return f"the folder has checkpoints in it: name one of them, such as {folder / inner[-1]}"
    if not names:
        return "the folder is empty"
    if (folder / ".metadata").exists():
        return (
            "it is a checkpoint of torch.distributed.checkpoint: convert it with torch's "
            "dcp_to_torch_save, and save it with dure.checkpoint"
        )
    return f"there is no {NAME}: the folder is not a checkpoint, or was never finished"


def sealed(manifest: Manifest) -> bytearray:
    """Return the text of a manifest, of the format that is written."""
    written = manifest.written.values()
    columns = [list(manifest.written), *([one[n] for one in written] for n in range(2))]
    ranks, num_bytes, headers = (runs_of(np.array(column, np.int64)) for column in columns)
    fields = {
        "sha256": "0" * _DIGEST_BYTES,
        "format": FORMAT,
        "version": VERSION,
        "needs": _NEEDS,
        "state": manifest.tree,
        "files": {
            "save": manifest.number,
            "id": manifest.id,
            "ranks": ranks,
            "bytes": num_bytes,
            "headers": headers,
            "crc32c": "".join([f"{record.header_crc32c:08x}" for record in written]),
        },
    }
    text = bytearray(json.dumps(fields, allow_nan=False).encode()[:-1])
    text += b', "tensors": ' + manifest.tensors.encode() + b"}"
    end = len(_HEAD) + _DIGEST_BYTES
    text[len(_HEAD) : end] = _digest(memoryview(text)[end:])
    return text


def _unsealed(content: bytes) -> tuple[bytes, bytes]:
    """Return the JSON text of a manifest of any format, whose checksum is right; and that."""
    end = len(_HEAD) + _DIGEST_BYTES
    if content.startswith(_HEAD):
        digest, sealed, text = content[len(_HEAD) : end], memoryview(content)[end:], content
    else:
        digest, _, text = content.partition(b"\n")
        sealed = memoryview(text)
    if digest != _digest(sealed):
        raise Unreadable(f"{NAME} is damaged, or not of Dure: its checksum is wrong")
    return text, digest


def _digest(sealed: memoryview) -> bytes:
    return hashlib.sha256(sealed).hexdigest().encode()


def _check_version(folder: AnyPath, fields: dict[str, Any]) -> None:
    name, version = fields.get("format"), fields.get("version")
    if name == FORMAT and type(version) is int and version > VERSION:
        raise too_new(folder, f"{NAME} is of format {version}", VERSION, fields.get("needs"))
    if name != FORMAT or version not in range(_OLDEST, VERSION + 1):
        raise Unreadable(
            f"it is of format {name!r}, version {version!r}, not {FORMAT!r}, "
            f"version {_OLDEST} to {VERSION}"
        )


def _catalog(folder: AnyPath, fields: dict[str, Any], digest: bytes) -> Catalog:
    tensors, tree = cast(dict[str, dict[str, Any]], fields["tensors"]), fields["state"]
    kinds = {name: _kind(name, tensor) for name, tensor in tensors.items()}
    if not isinstance(tree, dict):
        raise Unreadable(f"{NAME} is of no state")
    if fields["version"] < _COLUMNS:
        files, columns = _of_rows(kinds, tensors)
        catalog = Catalog(folder, tree, kinds, files, columns, digest)
        for name in kinds:
            catalog.cut(name)
    else:
        found = {n: Columns(*(tensor[f] for f in _FIELDS)) for n, tensor in tensors.items()}
        catalog = Catalog(folder, tree, kinds, _FileTable(fields["files"]), found, digest)
    for name, leaf in catalog.leaves.items():
        if isinstance(leaf.value, Named) and leaf.value not in kinds:
            raise Unreadable(f"{NAME} has no tensor {leaf.value!r}, which {name!r} is said to be")
    return catalog


class _FileTable(Sequence[StoredFile]):
    """The files of a manifest of format 4.

    Raises:
        ValueError: They are of another form.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self._save, self._id, self._sums = (fields[name] for name in ("save", "id", "crc32c"))
        columns = [column_of(fields[name]) for name in ("ranks", "bytes", "headers")]
        self._ranks, self._num_bytes, self._headers = columns
        if type(self._save) is not int or self._save < 1:
            raise ValueError(f"its files are of save {self._save!r:.60}")
        if not re.fullmatch(r"[0-9a-f]{32}", self._id):
            raise ValueError(f"the identity of its save is {self._id!r:.60}")
        if not re.fullmatch(r"([0-9a-f]{8})*", self._sums):
            raise ValueError("the checksums of its files are not digits")
        if {*map(len, columns)} != {len(self._sums) // 8}:
            raise ValueError(f"its columns of files have {[*map(len, columns)]} rows")
        for at in np.flatnonzero(self._headers.array() >= self._num_bytes.array())[:1]:
            name = part_name(self._save, self._ranks[int(at)])
            header, size = self._headers[int(at)], self._num_bytes[int(at)]
            raise ValueError(f"{name} has {size} bytes, and a header of {header}")

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, at: int) -> StoredFile: ...
    @overload
    def __getitem__(self, at: slice) -> list[StoredFile]: ...
    def __getitem__(self, at: int | slice) -> StoredFile | list[StoredFile]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        if at not in range(len(self)):
            raise IndexError(at)
        crc, rank = int(self._sums[8 * at : 8 * at + 8], 16), self._ranks[at]
        own = file_id(self._id, rank)
        record = FileRecord(self._num_bytes[at], self._headers[at], crc, own)
        return StoredFile(part_name(self._save, rank), record)


def _of_rows(
    kinds: dict[str, TensorKind], tensors: dict[str, dict[str, Any]]
) -> tuple[list[StoredFile], dict[str, Columns]]:
    """Return files and columns of a manifest of format 2 or 3, which has an entry per slice."""
    rows: dict[str, list[tuple[Slice, int]]] = {}
    parts: dict[str, list[Slice]] = {}
    placed: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        rows[name], placed[name] = [], []
        for entry in cast(list[dict[str, Any]], tensor["slices"]):
            offsets, sizes, crc32c = entry["offsets"], entry["sizes"], entry["crc32c"]
            _numbers(name, [*offsets, *sizes, crc32c])
            part, file = Slice(name, Box(tuple(offsets), tuple(sizes))), _file(name, entry["file"])
            rows[name].append((part, crc32c))
            placed[name].append(file)
            parts.setdefault(file, []).append(part)
    layouts = {file: FileLayout.of(found, kinds) for file, found in parts.items()}
    numbers = {file: number for number, file in enumerate(layouts)}
    columns: dict[str, Columns] = {}
    for name, found in rows.items():
        layouts_of = [layouts[file] for file in placed[name]]
        begins = [
            layout.begins[part] - len(layout.header)
            for layout, (part, _) in zip(layouts_of, found, strict=True)
        ]
        files, sums = [numbers[file] for file in placed[name]], [crc for _, crc in found]
        boxes, num_dims = [part.box for part, _ in found], len(kinds[name].shape)
        columns[name] = columns_of(boxes, num_dims, files, begins, sums)
    return [StoredFile(file, layout.record) for file, layout in layouts.items()], columns


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
