"""Saving folders of weights, as Hugging Face has them, from any sharding (`weight_reading` reads).

No rank ever holds all weights. Rank 0 makes the files, in full length, under hidden names of this
save. Ranks write the elements to their places in them (`weight_writing`), and flush. Checksums are
taken on the way.

Then rank 0 publishes the files. Each save takes new names for files that an index names, and
one rename publishes it:

1. A journal lists the new files, and those that the save will remove.
2. The new files get their names. The weights in the folder are still the old ones.
3. The new index replaces the old one. This is the commit.
4. Files that the old index named are removed, then the journal.

A single file is called model.safetensors, since programs expect that name. Its rename is the
commit; if there was an index, the weights are the old ones until the index is removed.

If a process is killed in the middle, the folder has the old or the new weights. The next save
removes what the journal lists and the weights do not need, and hidden files. Other files are not
touched: a save that would replace them is refused, except with `overwrite=True`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import StackSummary
from typing import Any

import torch

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.catalog import Unreadable, catalog_of, not_shared
from dure.checkpoint.contents import Catalog
from dure.checkpoint.files import DTYPES, write_all
from dure.checkpoint.folder import Folder
from dure.checkpoint.fsspec_path import local_path, path_of
from dure.checkpoint.local_files import (
    Unflushed,
    flush,
    flush_name,
    make,
    rename,
    replace_file,
)
from dure.checkpoint.reading import Mapped
from dure.checkpoint.restoring import read_slices, reads_of
from dure.checkpoint.saving import OnDemand, Saving, Taken
from dure.checkpoint.slice_files import FileLayout, Slice, TensorKind
from dure.checkpoint.slices import Box, Piece, full_box
from dure.checkpoint.tree import Named, tensor_node
from dure.checkpoint.weight_reading import (
    HIDDEN,
    INDEX,
    JOURNAL,
    KEY,
    SINGLE,
    cataloged,
    checksums_of,
    header_of,
    indexed_files,
    journaled,
)
from dure.checkpoint.weight_writing import FilePosition, Sums, WeightWriter, opened
from dure.errors import CheckpointError, CheckpointException, UsageError

__all__ = ["MAX_FILE_BYTES", "consolidate", "save_weights"]

MAX_FILE_BYTES = 5_000_000_000
"""Where a file ends and the next begins, as Hugging Face's libraries do it."""

_PART = re.compile(r"model-(?:(\d{6,})-)?\d{5}-of-\d{5}\.safetensors")
_NAMES = frozenset(DTYPES.values())
_NOT_SAVED = "the weights were not saved"
_NOT_FLUSHED = "the weights may not be durable"
_MOST_SHOWN = 8  # names in a message


@dataclass(frozen=True, slots=True)
class _FolderState:
    """What rank 0 found in the folder."""

    token: str
    """The token of this save in the hidden names."""
    number: int
    """The number of this save in the names of files, which is left out if it is 1."""
    indexed: bool
    """Whether there is an index."""
    old: tuple[str, ...]
    """Files to remove when the new weights are published."""


def _begin(folder: Folder, overwrite: bool) -> _FolderState:
    """Make a folder, lock it, remove leftovers, and find out what it contains.

    Raises:
        OSError: It cannot be made, or another job saves there.
        CheckpointError: The save would touch files that are not the weights of the folder.
    """
    path = local_path(folder.path, "a folder of weights")
    make(path)
    folder.hold()
    try:
        _clean(path)
        old = indexed_files(path)
        indexed = old is not None
    except CheckpointError as e:
        if not overwrite:
            e.advise("Save to another folder, or with overwrite=True, which keeps its files.")
            raise
        old, indexed = set[str](), True
    single = path / SINGLE
    if os.path.lexists(single) and SINGLE not in (old or ()):
        if not overwrite and (indexed or not _is_ours(single)):
            beside = f"which {INDEX} does not name" if indexed else "written by another program"
            raise CheckpointError(
                "the folder has other weights",
                path=str(path),
                seen=f"{single}, {beside}",
                fix="Save to another folder, or with overwrite=True, which replaces them.",
            )
        old = {*(old or ()), SINGLE}
    found = [_PART.fullmatch(name) for name in os.listdir(path)]
    number = max((int(m[1] or 1) for m in found if m), default=0) + 1
    there = tuple(sorted(name for name in old or () if os.path.lexists(path / name)))
    return _FolderState(secrets.token_hex(4), number, indexed, there)


def _is_ours(path: Path) -> bool:
    """Return whether a file has checksums of Dure."""
    with suppress(Unreadable, OSError, ValueError, AttributeError):
        return KEY in header_of(path.resolve()).metadata
    return False


def _clean(folder: Path) -> None:
    """Remove what an unfinished save left: its files that the weights of the folder do not need.

    Raises:
        CheckpointError: The index cannot be used; then only hidden files are removed.
        OSError: A file cannot be removed.
    """
    hidden = [name for name in os.listdir(folder) if name.startswith(f"{HIDDEN}model")]
    for name in hidden:
        if name != JOURNAL:
            (folder / name).unlink(missing_ok=True)
    if JOURNAL in hidden:
        flush(folder)  # the index is durable before the files of the one before it are removed
        _remove_journaled(folder)


def _remove_journaled(folder: Path) -> None:
    """Remove the files in the journal that the durable index does not name, then the journal.

    Raises:
        CheckpointError: The index cannot be used.
        OSError: A file cannot be removed.
    """
    needed = indexed_files(folder)
    needed = {SINGLE} if needed is None else needed
    for name in journaled(folder):
        if name not in needed:
            (folder / name).unlink(missing_ok=True)
    (folder / JOURNAL).unlink()


class _Files:
    """Files of complete tensors that are being written.

    Args:
        folder: The folder of weights.
        begun: Its contents.
        kinds: The tensors of these.
        boxes: For each tensor, the slices that have checksums.
        numbers: Of some tensors' files, from 1 on.
        max_bytes: How large a file gets; a larger tensor has one for itself.

    Raises:
        UsageError: The file format lacks a dtype.
    """

    def __init__(
        self,
        folder: Path,
        begun: _FolderState,
        kinds: dict[str, TensorKind],
        boxes: Mapping[str, Iterable[Box]],
        numbers: Mapping[str, int],
        max_bytes: int,
    ) -> None:
        self._folder, self._begun, self._kinds = folder, begun, kinds
        for name, kind in kinds.items():
            if kind.dtype not in _NAMES:
                raise UsageError(
                    "a folder of weights has no such tensors", seen=f"{name!r} is {kind}"
                )
        cut = _cut(kinds, numbers, max_bytes)
        # The name model.safetensors cannot be reused while an index names it.
        self._single = len(cut) == 1 and not (begun.indexed and SINGLE in begun.old)
        number = "" if begun.number == 1 else f"{begun.number:06d}-"
        names = [f"model-{number}{i + 1:05d}-of-{len(cut):05d}" for i in range(len(cut))]
        files = [SINGLE] if self._single else [f"{name}.safetensors" for name in names]
        self._parts = dict(zip(files, cut, strict=True))
        without = {name: dict.fromkeys(boxes[name], 0) for name in kinds}
        self._layouts = {file: self._layout(file, without) for file in files}

    def _layout(self, file: str, sums: Sums) -> FileLayout:
        """Lay a file out; the single one has the checksums in its header."""
        metadata = {"format": "pt"}
        if self._single:
            metadata |= checksums_of(self._kinds, sums)
        return FileLayout.of(self._parts[file], self._kinds, metadata)

    def path(self, file: str) -> Path:
        """Return the hidden path of a file, which it has until it is published."""
        return self._folder / f"{HIDDEN}{file}.{self._begun.token}"

    def make(self) -> None:
        """Make the files in full length, without contents; OSError if that fails."""
        for file, layout in self._layouts.items():
            with opened(self.path(file), os.O_CREAT | os.O_EXCL) as descriptor:
                os.ftruncate(descriptor, layout.num_bytes)

    def tensors(self) -> dict[str, FilePosition]:
        """Return where each tensor begins."""
        return {
            part.name: FilePosition(self.path(file), begin)
            for file, layout in self._layouts.items()
            for part, begin in layout.begins.items()
        }

    def _placed(self) -> dict[str, str]:
        """Return which file each tensor is in."""
        layouts = self._layouts.items()
        return {part.name: file for file, layout in layouts for part in layout.begins}

    def publish(self, sums: Sums) -> OSError | None:
        """Write the headers, and make the files the weights of the folder.

        Returns:
            The error of the last flush, if that failed: the weights are published.

        Raises:
            OSError: The weights are not published.
        """
        for file in self._layouts:
            layout = self._layout(file, sums)
            with opened(self.path(file)) as descriptor:
                write_all(descriptor, memoryview(layout.header), 0)
                os.fsync(descriptor)
        folder, old = self._folder, [n for n in self._begun.old if n not in self._layouts]
        journal = not self._single or self._begun.indexed
        if journal:
            _note(folder, [*self._layouts, *old])
        for file in self._layouts:
            rename(self.path(file), folder / file)
        failed: OSError | None = None
        try:
            if not self._single:
                replace_file(folder / INDEX, self._index(sums))
            elif self._begun.indexed:
                flush(folder)
                (folder / INDEX).unlink()
                flush_name(folder / SINGLE)
            else:
                flush_name(folder / SINGLE)
        except Unflushed as e:
            failed = e
        if journal and failed is None:  # otherwise a power failure may bring the old index back
            with suppress(OSError, CheckpointError):  # the next save removes them
                _remove_journaled(folder)
        return failed

    def catalog(self, sums: Sums) -> Catalog:
        """Return what the files contain."""
        layouts = {str(self._folder / file): self._layout(file, sums) for file in self._layouts}
        begins = {
            part.name: (path, begin)
            for path, layout in layouts.items()
            for part, begin in layout.begins.items()
        }
        records = {path: layout.record for path, layout in layouts.items()}
        return cataloged(self._folder, self._kinds, begins, records, sums)

    def _index(self, sums: Sums) -> bytes:
        placed = dict(sorted(self._placed().items()))
        size = sum(kind.num_bytes(full_box(kind.shape)) for kind in self._kinds.values())
        metadata = {"total_size": size} | checksums_of(self._kinds, sums)
        return json.dumps({"metadata": metadata, "weight_map": placed}, indent=2).encode()


def _cut(
    kinds: dict[str, TensorKind], numbers: Mapping[str, int], max_bytes: int
) -> list[list[Slice]]:
    """Distribute tensors over files."""
    cut: dict[int, list[Slice]] = {}
    number, filled = max(numbers.values(), default=1), 0
    for name, kind in kinds.items():
        part = Slice(name, full_box(kind.shape))
        num_bytes = kind.num_bytes(part.box)
        if name not in numbers:
            if filled and filled + num_bytes > max_bytes:
                number, filled = number + 1, 0
            filled += num_bytes
        cut.setdefault(numbers.get(name, number), []).append(part)
    return [cut[n] for n in sorted(cut)] or [[]]


def _note(folder: Path, files: list[str]) -> None:
    """Write and flush the journal."""
    with opened(folder / JOURNAL, os.O_CREAT | os.O_TRUNC) as descriptor:
        write_all(descriptor, memoryview(json.dumps(files).encode()), 0)
        os.fsync(descriptor)
    flush(folder)


class _Weights:
    """One save of one rank.

    Args:
        folder: Where to.
        saving: The state to save.
        ranks: Those that save.
    """

    def __init__(self, folder: Path, saving: Saving, ranks: Ranks) -> None:
        self._folder, self._saving, self._ranks = folder, saving, ranks

    def prepare(self, numbers: Mapping[str, int], max_bytes: int) -> None:
        """Compare the state with what files can hold; rank 0 makes the files.

        Raises:
            UsageError: The state has values, or tensors of a dtype that files do not support.
            CheckpointMismatch: Ranks have different tensors under one name.
            OSError: The files cannot be made.
        """
        stored = self._saving.names()
        self._names: dict[str, list[str]] = {}
        """Names in the files, by that of the tensor: tied weights have several."""
        for name, tensor in stored.items():
            if tensor is None:
                raise UsageError(
                    "a folder of weights can only contain tensors",
                    seen=f"{name!r} is a value",
                    fix="Save get_model_state_dict(model).",
                )
            self._names.setdefault(tensor, []).append(name)
        kinds = self._saving.kinds()
        self._kinds = {name: kinds[tensor] for name, tensor in stored.items() if tensor}
        parts = self._saving.parts()
        self._writer = WeightWriter(kinds, parts, self._saving.memory, self._ranks)
        self._boxes = {n: self._writer.boxes[tensor] for n, tensor in stored.items() if tensor}
        self.files = _Files(
            self._folder, self._saving.begun, self._kinds, self._boxes, numbers, max_bytes
        )
        if self._ranks.rank == 0:
            self.files.make()

    def write(self) -> Sums:
        """Write and flush the rows that this rank has; return the checksums of slices.

        Raises:
            CheckpointNotWritten: This rank does not see the files that rank 0 made.
            OSError: The disk is full, or a file cannot be written.
            RuntimeError: There is not enough memory for the exchange.
        """
        targets = self._targets()
        for path in {target.path for each in targets.values() for target in each}:
            if not path.exists():
                rank = self._ranks.rank
                raise not_shared(self._folder, f"rank {rank} does not see what rank 0 made there")
        written = self._writer.write(targets)
        self._writer.reserve(targets)
        return written

    def _targets(self) -> dict[str, list[FilePosition]]:
        places = self.files.tensors()
        return {tensor: [places[n] for n in names] for tensor, names in self._names.items()}

    def sums(self, written: list[Sums], not_saved: str) -> Sums:
        """Write the tensors that ranks exchange; return the checksums of all slices.

        Args:
            written: What `write` returned on each rank.
            not_saved: The message if it fails.

        Collective:
            All of the ranks, if there are such tensors.
        """
        if self._writer.exchanged:
            targets = self._targets()
            written += self._ranks.all_or_none(not_saved, lambda: self._writer.exchange(targets))
        found: Sums = {name: dict.fromkeys(boxes, 0) for name, boxes in self._boxes.items()}
        for one in written:
            for tensor, crcs in one.items():
                for name in self._names[tensor]:
                    found[name].update(crcs)
        return found


def save_weights(
    folder: Path,
    state_dict: Mapping[str, Any] | Taken,
    ranks: Ranks,
    numbers: Mapping[str, int],
    max_bytes: int,
    overwrite: bool = False,
) -> Catalog:
    """Save a state of tensors as a folder of weights; return what is in it.

    Raises:
        CheckpointException: It failed on some ranks, or there are values in the state.

    Collective:
        All of `ranks`. Five exchanges, or six (`Saving`); one more, and those of
        `WeightWriter.exchange`, if a tensor is divided by columns.
    """
    place, leads = Folder(folder), ranks.rank == 0
    begun: list[_FolderState] = []

    def begin() -> _FolderState | None:
        if leads:
            begun.append(_begin(place, overwrite))
        return begun[0] if begun else None

    try:
        saving = Saving(ranks, state_dict, begin)
        saving.share()
        weights = _Weights(folder, saving, ranks)
        ranks.all_or_none(_NOT_SAVED, lambda: weights.prepare(numbers, max_bytes))
        sums = weights.sums(ranks.all_or_none(_NOT_SAVED, weights.write), _NOT_SAVED)

        def publish() -> OSError | None:
            place.check()
            return weights.files.publish(sums)

        failed = ranks.first_or_none(_NOT_SAVED, publish)
    except BaseException:
        if begun:
            with suppress(OSError, CheckpointError):
                place.check()  # if another job has taken over, these are its files
                _clean(folder)
        raise
    finally:
        place.release()
    if failed is not None:
        raise CheckpointException(_NOT_FLUSHED, {0: (failed, StackSummary())}) from failed
    return weights.files.catalog(sums)


def consolidate(
    folder: str | os.PathLike[str],
    to: str | os.PathLike[str],
    prefix: str = "",
    max_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
) -> None:
    """Write the weights of a checkpoint into a folder, in this process alone.

    Every name that begins with the prefix is written, also if several names have one tensor.

    Args:
        folder: The checkpoint.
        to: The folder of weights; made if absent. Weights that it has are replaced.
        prefix: Take tensors whose names begin with this, and leave it out of their names.
        max_bytes: How large a file gets.
        overwrite: Whether invalid weights, and those that Dure did not write, may be replaced.

    Raises:
        UsageError: No tensor's name begins so.
        CheckpointError: The checkpoint has no tensors with names, or cannot be used.
        CheckpointException: A slice of it is damaged; the folder has other weights, or cannot be
            written. Earlier contents are unchanged.

    Cost:
        Memory of the largest tensor.

    Example:
        ```python
        dist.checkpoint.save({"model": torch.nn.Linear(4, 2)}, checkpoint_id="run/model")
        if dist.get_rank() == 0:
            dist.checkpoint.consolidate("run/model", "run/export", prefix="model.")
        ```
    """
    folder, to = path_of(folder), local_path(path_of(to), "a folder of weights")
    catalog = catalog_of(folder)
    leaves = catalog.leaves.items()
    stored = {n: str(v.value) for n, v in leaves if isinstance(v.value, Named)}
    if not stored:
        raise CheckpointError("the checkpoint has no tensors", path=str(folder), seen=str(folder))
    beginnings = sorted({name.partition(".")[0] for name in stored})
    stored = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}
    if not stored:
        raise UsageError(
            f"no tensor of the checkpoint begins with {prefix!r}",
            seen=f"names in {folder} begin with {', '.join(beginnings[:_MOST_SHOWN])}",
        )
    alone, mapped = Ranks(None, alone=True), Mapped(folder, catalog)

    def read(part: Slice) -> torch.Tensor:
        tensor = torch.empty(
            part.box.sizes, dtype=catalog.kinds[part.name].torch_dtype, device="cpu"
        )
        reads = list(reads_of(catalog, part.name, Piece(part.box, tensor)))
        read_slices(folder, catalog, reads, alone.num_threads, mapped)
        return tensor

    kinds = {name: catalog.kinds[name] for name in stored.values()}
    boxes = {name: full_box(kind.shape) for name, kind in kinds.items()}
    offer = {n: (k, (boxes[n],) if boxes[n].num_elements else (), 0) for n, k in kinds.items()}
    tree = {name: tensor_node(tensor) for name, tensor in stored.items()}
    save_weights(to, Taken(offer, OnDemand(read), tree), alone, {}, max_bytes, overwrite)
