"""Reading one checkpoint: is it whole, does it fit, and what is in it.

Ranks share out the checking: each tensor's bytes are read and compared with their checksum by one
of them. Loading is every rank's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dure.checkpoint.folder import Place
from dure.checkpoint.manifest import NAME, Manifest, Unreadable, read_manifest
from dure.checkpoint.objects import PerRank, check_fits, load_into
from dure.checkpoint.parts import DTYPES, Entry, dealt_out, pieces
from dure.checkpoint.randomness import restore_random_state, seed_new_rank
from dure.checkpoint.slice_files import Kind, Layout, Slice, SliceFile, write_slices
from dure.checkpoint.slices import whole_box
from dure.checkpoint.tree import decode
from dure.comm.checksum import crc32c
from dure.errors import CheckpointError, CheckpointMismatch

__all__ = ["RANDOM", "Loading", "inspect", "write_part"]

RANDOM = "(random)"
"""The name of the generators' state among a rank's own objects."""


def inspect(place: Place, rank: int, size: int) -> Manifest | str:
    """Return a checkpoint's manifest if this rank's share of it is whole, else what is wrong."""
    try:
        manifest = read_manifest(place.path / NAME)
    except Unreadable as e:
        return str(e)
    if manifest.step != place.step:
        return f"its manifest is of step {manifest.step}"
    try:
        tensors = {n: _mapped(place.path / n, e) for n, e in manifest.parts.items()}
    except (CheckpointError, KeyError) as e:
        return e.seen if isinstance(e, CheckpointError) else f"there is no dtype {e}"
    entries = {(n, e.name): e for n, part in manifest.parts.items() for e in part}
    owner = dealt_out({key: e.num_bytes for key, e in entries.items()}, size)
    for (part, name), entry in entries.items():
        if owner[part, name] == rank and _sum(tensors[part][name]) != entry.crc32c:
            return f"{name} in {part} is changed: its checksum is wrong"
    return manifest


def write_part(path: Path, tensors: dict[str, torch.Tensor]) -> list[Entry]:
    """Write whole tensors to a new file, through to the disk; return what is in it, in its order.

    Raises:
        OSError: The disk is full, or the file cannot be written.
    """
    kinds = {name: Kind(DTYPES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    layout = _layout(kinds)
    memory = {part: tensors[part.name] for part in layout.begins}
    return [
        Entry(p.name, *kinds[p.name], kinds[p.name].num_bytes(p.box), crc)
        for p, crc in zip(memory, write_slices(path, layout, memory), strict=True)
    ]


def _layout(kinds: dict[str, Kind]) -> Layout:
    return Layout.of([Slice(name, whole_box(kind.shape)) for name, kind in kinds.items()], kinds)


def _mapped(path: Path, entries: list[Entry]) -> dict[str, torch.Tensor]:
    """Return the tensors of a part, mapped from its file."""
    kinds = {entry.name: Kind(entry.dtype, entry.shape) for entry in entries}
    file = SliceFile(path, _layout(kinds))
    try:
        return {
            part.name: file.mapped(part, kinds[part.name].torch_dtype)
            for part in file.layout.begins
        }
    finally:
        file.close()


def _sum(tensor: torch.Tensor) -> int:
    """Read a tensor's bytes and return their CRC-32C."""
    crc = 0
    for piece in pieces(tensor):
        crc = crc32c(piece, crc)
    return crc


class Loading:
    """One whole checkpoint, as one rank reads it."""

    def __init__(self, path: Path, manifest: Manifest, rank: int, size: int) -> None:
        self._path, self._manifest, self._rank, self._size = path, manifest, rank, size
        self._tensors: dict[str, torch.Tensor] = {}
        for name, entries in manifest.parts.items():
            self._tensors |= _mapped(path / name, entries)
        self._entries = manifest.entry_of()

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of that name, mapped from its file."""
        return self._tensors[name]

    def check(self, objects: dict[str, Any]) -> None:
        """Compare all objects with the file, before any is changed."""
        for name, value in objects.items():
            try:
                check_fits(name, value, self._tree(name, value), self._entries)
            except CheckpointMismatch as e:
                raise CheckpointMismatch(
                    e.what, path=str(self._path), seen=f"{e.seen}; in {self._path}", fix=e.fix
                ) from None

    def load(self, objects: dict[str, Any]) -> None:
        """Put all objects back, then the random generators."""
        for name, value in objects.items():
            load_into(name, value, self._tree(name, value), self)
        ranks = self._manifest.ranks
        if self._rank < len(ranks):
            restore_random_state(decode(ranks[self._rank][RANDOM], self.tensor))
        else:
            seed_new_rank(decode(ranks[0][RANDOM], self.tensor), self._rank)

    def _tree(self, name: str, value: Any) -> Any:
        saved = self._manifest.objects
        if isinstance(value, PerRank):
            if self._size != self._manifest.world_size:
                raise CheckpointMismatch(
                    f"{name!r} was saved by each rank, and the number of ranks is another",
                    seen=f"{self._manifest.world_size} ranks saved it, {self._size} load it",
                    fix="Load it with as many ranks as saved it.",
                )
            saved = self._manifest.ranks[self._rank]
        if name not in saved:
            raise CheckpointMismatch(
                f"there is no {name!r} in the checkpoint",
                seen=f"it has {sorted(saved)}",
                fix="Pass the same names, and PerRank where it was, to save and load.",
            )
        return saved[name]
