"""Saving a state dictionary: each rank writes its slices, rank 0 the manifest.

1. Rank 0 makes the folder; all tell what they have (or that it is what it was), and their trees.
   A save in the background holds copies from here on, and makes the folder later.
2. Each writes its file, through to the disk; all tell how it went, and the slices' checksums.
3. Rank 0 puts the manifest in its place; all learn that it is there.

What fails on any rank fails on all, before anything of the folder's checkpoint is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.catalog import (
    NAME,
    Catalog,
    Stored,
    leaves_of,
    next_number,
    part_name,
    publish,
    remove,
)
from dure.checkpoint.files import can_be_named
from dure.checkpoint.folder import Folder, make
from dure.checkpoint.objects import own_state
from dure.checkpoint.planning import Division, Offer, digest_of, known_to
from dure.checkpoint.slice_files import Kind, Layout, Slice, kind_of, write_slices
from dure.checkpoint.slices import Box, pieces_of
from dure.checkpoint.tree import Named, encode, flatten, merged
from dure.errors import CheckpointError, CheckpointMismatch, UsageError

__all__ = ["Saving", "Taken", "begin", "save_into", "take"]

_NOT_SAVED = "the checkpoint was not saved"


@dataclass(frozen=True, slots=True)
class Taken:
    """What one rank has to save. The tensors are those of the program, not copies."""

    offer: Offer
    memory: dict[Slice, torch.Tensor]
    tree: Any


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank tells the others before writing."""

    digest: bytes
    offer: Offer | None
    tree: Any
    begun: Any
    """What `before` returned."""


def take(state_dict: Mapping[str, Any]) -> Taken:
    """Take a state apart into slices and a tree. No communication.

    Raises:
        UsageError: Something in it cannot be saved; its name is told.
    """
    state = {key: own_state(value) for key, value in state_dict.items()}
    for name in flatten(state):
        if not can_be_named(name):
            raise UsageError("nothing can be saved under this name", seen=f"{name!a}")
    tensors: dict[str, torch.Tensor] = {}
    taken = Taken({}, {}, encode(state, "", tensors))
    for name, tensor in tensors.items():
        pieces, kind = pieces_of(name, tensor), kind_of(tensor)
        if kind is None:
            raise UsageError("a tensor cannot be in a checkpoint", seen=f"{name} is {tensor.dtype}")
        taken.offer[name] = kind, tuple(piece.box for piece in pieces)
        for piece in pieces:
            taken.memory[Slice(name, piece.box)] = piece.memory.resolve_conj().resolve_neg()
    return taken


class Saving:
    """One save of one rank.

    Args:
        ranks: Those that save.
        state_dict: What they save; or what `take` made of it.
        before: Called first, with all else that may fail: where it raises on one rank, all fail.

    Raises:
        CheckpointException: It failed on some ranks; nothing was written.

    Collective: all of `ranks`. One exchange.
    """

    def __init__(
        self,
        ranks: Ranks,
        state_dict: Mapping[str, Any] | Taken,
        before: Callable[[], Any] = lambda: None,
    ) -> None:
        self._ranks, known = ranks, known_to(ranks.group)
        mine: list[Taken] = []

        def tell() -> _Told:
            begun = before()
            mine.append(state_dict if isinstance(state_dict, Taken) else take(state_dict))
            digest = digest_of(mine[0].offer)
            offer = None if known.has(ranks.rank, digest) else mine[0].offer
            return _Told(digest, offer, mine[0].tree, begun)

        self._told = ranks.all_or_none(_NOT_SAVED, tell)
        self._memory = mine[0].memory
        self._division: Division | CheckpointMismatch | UsageError
        try:  # what is wrong is so on all ranks
            self._division = known.division([(t.digest, t.offer) for t in self._told])
            self._tree = reduce(merged, (one.tree for one in self._told))
            if any(one.tree != self._tree for one in self._told):
                leaves_of(self._tree)  # has no two of one name
        except (CheckpointMismatch, UsageError) as e:
            self._division = e

    def _divided(self) -> Division:
        if isinstance(self._division, Division):
            return self._division
        raise self._division

    def hold(self, copy: Callable[[dict[Slice, torch.Tensor]], dict[Slice, torch.Tensor]]) -> None:
        """Keep copies of what this rank writes: the program may change its tensors from now on.

        Raises:
            CheckpointException: It failed on some ranks.

        Collective: all of the ranks. One exchange.
        """

        def held() -> None:
            self._memory = copy(self.mine())

        self._ranks.all_or_none(_NOT_SAVED, held)

    def write(self, path: Path, number: int) -> Catalog:
        """Write into the folder `path`, as its `number`-th save; return the manifest.

        Raises:
            CheckpointException: It failed on some ranks; what was saved before is as it was.

        Collective: all of the ranks. Two exchanges.
        """
        ranks = self._ranks

        def write() -> list[int]:
            layout = self._divided().layouts[ranks.rank]
            if not layout.begins:
                return []
            return write_slices(path / part_name(number, ranks.rank), layout, self._memory)

        try:
            sums = ranks.all_or_none(_NOT_SAVED, write)
        except BaseException:
            if ranks.rank == 0:
                with suppress(OSError):
                    remove(path, number=number)
            raise
        catalog = self._catalog(sums, number)
        ranks.all_or_none(_NOT_SAVED, lambda: publish(path, catalog) if ranks.rank == 0 else None)
        return catalog

    def _catalog(self, sums: list[list[int]], number: int) -> Catalog:
        """Put together what ranks told, and the sums of what they wrote."""
        division = self._divided()
        slices: dict[str, dict[Box, Stored]] = {name: {} for name in division.kinds}
        layouts: dict[str, Layout] = {}
        for rank, (layout, crcs) in enumerate(zip(division.layouts, sums, strict=True)):
            if crcs:
                file = part_name(number, rank)
                layouts[file] = layout
                for part, crc in zip(layout.begins, crcs, strict=True):
                    slices[part.name][part.box] = Stored(file, crc)
        return Catalog(self._tree, division.kinds, slices, layouts)

    def kinds(self) -> dict[str, Kind]:
        """Return what is saved by all ranks; CheckpointMismatch where they do not fit together."""
        return self._divided().kinds

    def mine(self) -> dict[Slice, torch.Tensor]:
        """Return what this rank is to write; errors as `kinds`."""
        begins = self._divided().layouts[self._ranks.rank].begins
        return {part: self._memory[part] for part in begins}

    def values(self) -> list[str]:
        """Return the names of what is no tensor; errors as `kinds`."""
        self._divided()
        leaves = leaves_of(self._tree).items()
        return [name for name, leaf in leaves if not isinstance(leaf.value, Named)]

    @property
    def begun(self) -> Any:
        """What `before` returned on rank 0."""
        return self._told[0].begun


def begin(folder: Folder, replace: bool) -> int:
    """Make a folder, keep others from saving there, and return the number of a new save.

    Raises:
        OSError: It cannot be made, or somebody else saves there.
        CheckpointError: There is a checkpoint, and it is not to be replaced.
    """
    path = folder.path
    make(path)
    folder.hold()
    if not replace and (path / NAME).exists():
        raise CheckpointError("there is a checkpoint already", path=str(path), seen=f"{path}")
    return next_number(path)


def save_into(
    path: Path, state_dict: Mapping[str, Any] | Taken, ranks: Ranks, replace: bool = True
) -> Catalog:
    """Save a state into the folder `path`; with `replace` also where a checkpoint is there.

    Returns its manifest.

    Raises:
        CheckpointException: It failed on some ranks; what was saved before is as it was.

    Collective: all of `ranks`. Three exchanges.
    """
    folder = Folder(path)
    try:
        saving = Saving(
            ranks, state_dict, lambda: begin(folder, replace) if ranks.rank == 0 else None
        )
        return saving.write(path, saving.begun)
    finally:
        folder.release()
