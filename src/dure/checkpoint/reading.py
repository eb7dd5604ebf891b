"""Reading complete checkpoints: are all bytes as written, the contents of one, differences of two.

Slices are checked piece by piece, and tensors are mapped, so reading takes no memory. The ranks
that load a run share the work: each slice is read and compared with its checksum by one of them. A
rank opens the files of its share, and those that have elements of its tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dure.checkpoint.catalog import Catalog, catalog_of
from dure.checkpoint.files import damaged
from dure.checkpoint.slice_files import Slice, SliceFile
from dure.checkpoint.slices import Box, full_box
from dure.checkpoint.tree import encode
from dure.comm.reduction import as_bytes
from dure.errors import CheckpointDamaged

__all__ = ["Mapped", "differences", "faults", "share_of"]

_PIECE_ELEMENTS = 1 << 20


class Mapped:
    """The tensors of a checkpoint, mapped from its files, which are opened when they are needed.

    A file is closed as soon as it is mapped. All methods but `open_all` open the files of the
    slices that they are given. A file that is not what the manifest says is a `CheckpointDamaged`;
    one that cannot be opened or read, a `CheckpointError`.

    Args:
        folder: The checkpoint.
        catalog: Its manifest.
    """

    def __init__(self, folder: Path, catalog: Catalog) -> None:
        self._folder, self._catalog = folder, catalog
        self._files: dict[str, SliceFile] = {}

    def open_all(self) -> None:
        """Open every file, and compare its length and header with the manifest."""
        for name in self._catalog.layouts:
            self._file(name)

    def _file(self, name: str) -> SliceFile:
        if name not in self._files:
            layout = self._catalog.layouts[name]
            self._files[name] = SliceFile(self._folder / name, layout, stays_open=False).map()
        return self._files[name]

    def check(self, parts: Iterable[Slice]) -> None:
        """Read slices, and compare them with their checksums.

        Raises:
            CheckpointDamaged: One is not as it was written.
            CheckpointError: A file cannot be opened or read.
        """
        for part in parts:
            fault = _fault(self._catalog, self._file(self._stored_in(part)), part)
            if fault:
                raise damaged(self._folder, fault)

    def _stored_in(self, part: Slice) -> str:
        return self._catalog.slices[part.name][part.box].file

    def _slice(self, part: Slice, dtype: torch.dtype) -> torch.Tensor:
        return self._file(self._stored_in(part)).mapped_slice(part, dtype)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a full tensor, mapped if it is one slice; its bytes are not checked."""
        kind, boxes = self._catalog.kinds[name], self._catalog.slices[name]
        full, dtype = full_box(kind.shape), kind.torch_dtype
        if full in boxes:
            return self._slice(Slice(name, full), dtype)
        made = torch.empty(kind.shape, dtype=dtype, device="cpu")
        for box in boxes:
            made[box.within(full)] = self._slice(Slice(name, box), dtype)
        return made

    def checked(self, name: str) -> torch.Tensor:
        """Return a full tensor as `tensor`, after comparing its bytes with their checksums.

        Raises:
            CheckpointDamaged: They are not.
        """
        self.check(Slice(name, box) for box in self._catalog.slices[name])
        return self.tensor(name)


def _fault(catalog: Catalog, file: SliceFile, part: Slice) -> str | None:
    """Read a slice; return what is wrong with it, None if nothing is, or it has no checksum."""
    wanted = catalog.slices[part.name][part.box].crc32c
    if wanted is None:
        return None
    return file.fault(part, wanted, catalog.kinds[part.name].num_bytes(part.box))


def faults(folder: Path, catalog: Catalog) -> list[str]:
    """Open every file, read every byte, and return what is not as it was written.

    Raises:
        CheckpointError: A file cannot be opened or read.

    Cost: one pass over the bytes; no memory.
    """
    found: list[str] = []
    for name, layout in catalog.layouts.items():
        try:
            with SliceFile(folder / name, layout) as file:
                found += [f for part in layout.begins if (f := _fault(catalog, file, part))]
        except CheckpointDamaged as e:
            found.append(e.seen)
    return found


def share_of(catalog: Catalog, rank: int, num_ranks: int) -> list[Slice]:
    """Return the slices that one of several ranks is to check.

    In the order of the files, each rank gets the slices that begin in its share of the bytes. So
    the share of a rank is in few files, and every file is in the share of a rank.
    """
    total, begin = catalog.num_bytes, 0
    mine: list[Slice] = []
    for layout in catalog.layouts.values():
        for part in layout.begins:
            if begin * num_ranks // total == rank:
                mine.append(part)
            begin += catalog.kinds[part.name].num_bytes(part.box)
    return mine


def differences(first: Path, second: Path) -> list[str]:
    """Return how the second checkpoint differs from the first: names, kinds, values, elements.

    Tensors that are cut the same way and have the same checksums are taken to be the same; of
    others the bits of the elements are compared. So a NaN equals one of the same bits, and 0.0 is
    not -0.0.

    Raises:
        CheckpointDamaged: One is damaged.
        CheckpointError: One cannot be opened or read.

    Cost: memory of the largest tensor, for each of the two that has it in slices.
    """
    a, b = catalog_of(first), catalog_of(second)
    tensors = Mapped(first, a), Mapped(second, b)
    for mapped in tensors:
        mapped.open_all()
    found = [f"{name} is in the first only" for name in sorted(a.leaves.keys() - b.leaves.keys())]
    found += [f"{name} is in the second only" for name in sorted(b.leaves.keys() - a.leaves.keys())]
    for name in sorted(a.leaves.keys() & b.leaves.keys()):
        one, other = a.kind_of(name), b.kind_of(name)
        mine, its = a.leaves[name].value, b.leaves[name].value
        if one != other:
            found.append(f"{name} is {one or 'a value'}, and {other or 'a value'}")
        elif one is None:
            if _text(mine) != _text(its):
                found.append(f"{name} is {mine!r:.60}, and {its!r:.60}")
        elif _sums(a, mine) != _sums(b, its):
            count = _num_different(tensors[0].checked(mine), tensors[1].checked(its))
            if count:
                found.append(
                    f"{name} differs in {count} of {torch.Size(one.shape).numel()} elements"
                )
    return found


def _sums(catalog: Catalog, name: str) -> dict[Box, int | None]:
    return {box: stored.crc32c for box, stored in catalog.slices[name].items()}


def _text(value: Any) -> str:
    """Return a value as text, which differs for 1, 1.0 and True, and is equal for equal NaNs."""
    return json.dumps(encode(value, "", {}), sort_keys=True)


def _num_different(first: torch.Tensor, second: torch.Tensor) -> int:
    """Return in how many elements the bits differ."""
    size, count = first.element_size(), 0
    both = as_bytes(first), as_bytes(second)
    for mine, its in zip(*(one.split(_PIECE_ELEMENTS * size) for one in both), strict=True):
        if not mine.equal(its):
            count += int((mine.view(-1, size) != its.view(-1, size)).any(1).sum())
    return count
