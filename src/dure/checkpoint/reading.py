"""Reading complete checkpoints: are all bytes as written, the contents of one, differences of two.

Slices are checked piece by piece, and tensors are mapped, so reading takes no memory. The ranks
that load a run share the work: each slice is read and compared with its checksum by one of them. A
rank opens the files of its share, and those that have elements of its tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch

from dure.checkpoint.catalog import catalog_of
from dure.checkpoint.contents import Catalog
from dure.checkpoint.files import damaged
from dure.checkpoint.fsspec_path import AnyPath
from dure.checkpoint.slice_files import FileLayout, Slice, SliceFile, Stored
from dure.checkpoint.slices import Box, full_box
from dure.checkpoint.tree import encode
from dure.comm.reduction import as_bytes
from dure.errors import CheckpointDamaged

__all__ = ["Mapped", "differences", "faults"]

_PIECE_ELEMENTS = 1 << 20


class Mapped:
    """The tensors of a checkpoint, mapped from its files, which are opened when they are needed.

    A file is closed as soon as it is mapped. All methods but `open_all` open the files of the
    slices that they are given. Its header is read once, and compared once with all slices that the
    manifest has of it, so reading every tensor takes a time that grows with the slices. A file that
    is not what the manifest says is a `CheckpointDamaged`; one that cannot be opened or read, a
    `CheckpointError`.

    A manifest may claim more slices than there is memory for. So files are opened before their
    slices are listed: headers that exist have so many at most.

    Args:
        folder: The checkpoint.
        catalog: Its manifest.
    """

    def __init__(self, folder: AnyPath, catalog: Catalog) -> None:
        self._folder, self._catalog = folder, catalog
        self._files: dict[int, SliceFile] = {}
        self._compared: set[int] = set()

    def open_all(self) -> None:
        """Open every file, and compare it with the manifest."""
        for number in range(len(self._catalog.files)):
            self.compared(number)

    def _file(self, number: int) -> SliceFile:
        if number not in self._files:
            name, record = self._catalog.files[number]
            self._files[number] = SliceFile(self._folder / name, record, stays_open=False).map()
        return self._files[number]

    def compared(self, number: int) -> SliceFile:
        """Return a file, which has the slices that the manifest has of it."""
        file = self._file(number)
        if number not in self._compared:
            fault = _fault_of_header(self._catalog, file, self._catalog.in_file(number))
            if fault:
                raise damaged(self._folder, fault)
            self._compared.add(number)
        return file

    def share_of(self, rank: int, num_ranks: int) -> list[tuple[Slice, Stored]]:
        """Return the slices that one of several ranks is to check.

        In the order of the files, each rank gets the slices that begin in its share of the bytes.
        So the share of a rank is in few files, and every file is in the share of a rank.
        """
        catalog = self._catalog
        records = [file.record for file in catalog.files]
        total, begin = sum(one.num_bytes - one.header_bytes for one in records), 0
        mine: list[tuple[Slice, Stored]] = []
        for number, record in enumerate(records):
            size = record.num_bytes - record.header_bytes
            ranks = range(begin * num_ranks // total, (begin + size - 1) * num_ranks // total + 1)
            if rank in ranks:
                self._file(number)
                for part, stored in catalog.in_file(number):
                    at = begin + stored.begin - record.header_bytes
                    if at * num_ranks // total == rank:
                        mine.append((part, stored))
            begin += size
        return mine

    def check(self, parts: Iterable[tuple[Slice, Stored]]) -> None:
        """Read slices, and compare them with their checksums.

        Raises:
            CheckpointDamaged: One is not as it was written.
            CheckpointError: A file cannot be opened or read.
        """
        for number, of_file in groupby(parts, lambda one: one[1].file):
            file = self.compared(number)
            for part, stored in of_file:
                fault = _fault(self._catalog, file, part, stored)
                if fault:
                    raise damaged(self._folder, fault)

    def sums(self, name: str) -> dict[Box, int | None]:
        """Return the checksums of a tensor's slices."""
        parts = self._catalog.parts(name)
        return {part.box: self.compared(at.file).sum_of(part, at) for part, at in parts}

    def tensor(self, name: str) -> torch.Tensor:
        """Return a full tensor, mapped if it is one slice; its bytes are not checked."""
        kind, parts = self._catalog.kinds[name], self._catalog.parts(name)
        full, dtype = full_box(kind.shape), kind.torch_dtype
        slices = ((part, self._file(at.file).mapped_slice(part, at, dtype)) for part, at in parts)
        if len(parts) == 1:
            return next(slices)[1]
        made = torch.empty(kind.shape, dtype=dtype, device="cpu")
        for part, tensor in slices:
            made[part.box.within(full)] = tensor
        return made

    def checked(self, name: str) -> torch.Tensor:
        """Return a full tensor as `tensor`, after comparing its bytes with their checksums.

        Raises:
            CheckpointDamaged: They are not.
        """
        self.check(self._catalog.parts(name))
        return self.tensor(name)


def _fault(catalog: Catalog, file: SliceFile, part: Slice, stored: Stored) -> str | None:
    """Read a slice; return what is wrong with it, None if nothing is, or it has no checksum."""
    return file.fault(part, stored, catalog.kinds[part.name].num_bytes(part.box))


def faults(folder: AnyPath, catalog: Catalog) -> list[str]:
    """Open every file, read every byte, and return what is not as it was written.

    Raises:
        CheckpointError: A file cannot be opened or read.

    Cost:
        One pass over the bytes; no memory.
    """
    found: list[str] = []
    for number, (name, record) in enumerate(catalog.files):
        try:
            with SliceFile(folder / name, record) as file:
                parts = catalog.in_file(number)
                of_slices = [_fault(catalog, file, *one) for one in parts]
                found += filter(None, [_fault_of_header(catalog, file, parts), *of_slices])
        except CheckpointDamaged as e:
            found.append(e.seen)
    return found


def _fault_of_header(
    catalog: Catalog, file: SliceFile, parts: list[tuple[Slice, Stored]]
) -> str | None:
    """Return what is wrong if a header has not the slices, and no others, that the manifest has.

    Cost:
        The header is laid out and compared as bytes; it is not parsed.
    """
    if any(stored.place is None for _, stored in parts):
        return None  # of these the header was worked out, or read
    layout, header = FileLayout.summed([part for part, _ in parts], catalog.kinds), file.header()
    places = [(layout.begins[part], n) for n, (part, _) in enumerate(parts)]
    is_placed = places == [(stored.begin, stored.place) for _, stored in parts]
    if is_placed and layout.is_header(header):
        return None
    return f"{file.path.name} has other slices than its manifest says"


def differences(first: AnyPath, second: AnyPath) -> list[str]:
    """Return how the second checkpoint differs from the first: names, kinds, values, elements.

    Tensors that are cut the same way and have the same checksums are taken to be the same; of
    others the bits of the elements are compared. So a NaN equals one of the same bits, and 0.0 is
    not -0.0.

    Raises:
        CheckpointDamaged: One is damaged.
        CheckpointError: One cannot be opened or read.

    Cost:
        Memory of the largest tensor, for each of the two that has it in slices.
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
        elif tensors[0].sums(mine) != tensors[1].sums(its):
            count = _num_different(tensors[0].checked(mine), tensors[1].checked(its))
            if count:
                found.append(
                    f"{name} differs in {count} of {torch.Size(one.shape).numel()} elements"
                )
    return found


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
