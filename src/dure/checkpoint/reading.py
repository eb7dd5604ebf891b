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
from dure.checkpoint.parts import PartReader, dealt_out
from dure.checkpoint.randomness import restore_random_state, seed_new_rank
from dure.checkpoint.tree import decode
from dure.errors import CheckpointMismatch

__all__ = ["RANDOM", "Loading", "inspect"]

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
    readers = {name: PartReader(place.path / name, e) for name, e in manifest.parts.items()}
    for reader in readers.values():
        fault = reader.fault()
        if fault:
            return fault
    sizes = {(n, e.name): e.num_bytes for n, entries in manifest.parts.items() for e in entries}
    owner = dealt_out(sizes, size)
    for part, name in sizes:
        fault = readers[part].tensor_fault(name) if owner[part, name] == rank else None
        if fault:
            return fault
    return manifest


class Loading:
    """One whole checkpoint, as one rank reads it."""

    def __init__(self, path: Path, manifest: Manifest, rank: int, size: int) -> None:
        self._path, self._manifest, self._rank, self._size = path, manifest, rank, size
        self._parts = {n: PartReader(path / n, e) for n, e in manifest.parts.items()}
        self._part_of = {e.name: n for n, entries in manifest.parts.items() for e in entries}
        self._entries = manifest.entry_of()

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of that name, mapped from its file."""
        return self._parts[self._part_of[name]].tensor(name)

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
