"""Reading whole checkpoints: are all bytes as they were written, what is in one, how do two differ.

Files are mapped, so that what is read takes no memory. Those that load a run share the checking
out: each slice is read and compared with its checksum by one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from dure.checkpoint.catalog import Catalog, catalog_of
from dure.checkpoint.files import pieces
from dure.checkpoint.planning import deal
from dure.checkpoint.slice_files import Slice, SliceFile
from dure.checkpoint.slices import Box, whole_box
from dure.checkpoint.tree import encode
from dure.comm.checksum import crc32c
from dure.errors import CheckpointError

__all__ = ["Mapped", "damaged", "differences", "faults", "share_of"]


class Mapped:
    """The tensors of a checkpoint, mapped from its files, which may be closed and removed.

    Args:
        folder: The checkpoint.
        catalog: Its manifest.
        files: Of these files only; None: of all.

    Raises:
        CheckpointError: A file is not what the manifest says. What is in it is not looked at.
    """

    def __init__(self, folder: Path, catalog: Catalog, files: Iterable[str] | None = None) -> None:
        self._folder, self._catalog = folder, catalog
        self._slices: dict[Slice, torch.Tensor] = {}
        for name in catalog.layouts if files is None else files:
            file = SliceFile(folder / name, catalog.layouts[name])
            try:
                for part in file.layout.begins:
                    dtype = catalog.kinds[part.name].torch_dtype
                    self._slices[part] = file.mapped(part, dtype)
            finally:
                file.close()

    def fault(self, part: Slice) -> str | None:
        """Read a slice and say if it is not as it was written; None: it is, or nobody knows."""
        stored, crc = self._catalog.slices[part.name][part.box], 0
        if stored.crc32c is None:
            return None
        for piece in pieces(self._slices[part]):
            crc = crc32c(piece, crc)
        if crc == stored.crc32c:
            return None
        return f"{part.name}{part.box} in {stored.file} is changed: its checksum is wrong"

    def check(self, parts: Iterable[Slice]) -> None:
        """Read slices, and compare them with their checksums.

        Raises:
            CheckpointError: One is not as it was written.
        """
        for part in parts:
            fault = self.fault(part)
            if fault:
                raise damaged(self._folder, fault)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor, mapped if it is one slice; its bytes are not checked."""
        kind, boxes = self._catalog.kinds[name], self._catalog.slices[name]
        whole = whole_box(kind.shape)
        if whole in boxes:
            return self._slices[Slice(name, whole)]
        made = torch.empty(kind.shape, dtype=kind.torch_dtype)
        for box in boxes:
            made[box.within(whole)] = self._slices[Slice(name, box)]
        return made

    def checked(self, name: str) -> torch.Tensor:
        """Return a whole tensor as `tensor`, whose bytes are those that were written.

        Raises:
            CheckpointError: They are not.
        """
        self.check(Slice(name, box) for box in self._catalog.slices[name])
        return self.tensor(name)


def damaged(folder: Path, seen: str) -> CheckpointError:
    """Return the error that tells what is wrong with a checkpoint."""
    return CheckpointError(
        "the checkpoint is damaged", path=str(folder), seen=f"{seen}; in {folder}"
    )


def faults(folder: Path, catalog: Catalog) -> list[str]:
    """Open every file, read every byte, and return what is not as it was written.

    Cost: one pass over the bytes; no memory.
    """
    found: list[str] = []
    for name, layout in catalog.layouts.items():
        try:
            mapped = Mapped(folder, catalog, [name])
        except CheckpointError as e:
            found.append(e.seen)
            continue
        found += [fault for part in layout.begins if (fault := mapped.fault(part))]
    return found


def share_of(catalog: Catalog, rank: int, num_ranks: int) -> list[Slice]:
    """Return the slices that one of several ranks is to check, about as many bytes as others."""
    anybody = list(range(num_ranks))
    holders = {part: anybody for layout in catalog.layouts.values() for part in layout.begins}
    return deal(holders, catalog.kinds, num_ranks)[rank]


def differences(first: Path, second: Path) -> list[str]:
    """Return how the second checkpoint differs from the first: names, kinds, values, elements.

    Tensors that are cut alike and have the same checksums are taken to be the same; of others the
    elements are compared.

    Raises:
        CheckpointError: One cannot be used, or is damaged.

    Cost: memory of the largest tensor, for each of the two that has it in slices.
    """
    a, b = catalog_of(first), catalog_of(second)
    tensors = Mapped(first, a), Mapped(second, b)
    found = [f"{name} is in the first only" for name in sorted(a.leaves.keys() - b.leaves.keys())]
    found += [f"{name} is in the second only" for name in sorted(b.leaves.keys() - a.leaves.keys())]
    for name in sorted(a.leaves.keys() & b.leaves.keys()):
        one, other = a.kind_of(name), b.kind_of(name)
        mine, its = a.leaves[name].value, b.leaves[name].value
        if one != other:
            found.append(f"{name} is {one or 'a value'}, and {other or 'a value'}")
        elif one is None:
            if encode(mine, "", {}) != encode(its, "", {}):
                found.append(f"{name} is {mine!r:.60}, and {its!r:.60}")
        elif _sums(a, mine) != _sums(b, its):
            count = int((tensors[0].checked(mine) != tensors[1].checked(its)).sum())
            if count:
                found.append(
                    f"{name} differs in {count} of {torch.Size(one.shape).numel()} elements"
                )
    return found


def _sums(catalog: Catalog, name: str) -> dict[Box, int | None]:
    return {box: stored.crc32c for box, stored in catalog.slices[name].items()}
