"""Saving and loading the whole of a data-parallel run, so that it goes on as if nothing happened.

*Save.* Rank 0 makes a hidden folder; ranks write their parts into it; all tell each other how it
went; rank 0 writes the manifest and renames the folder (the commit, see `folder`); all learn that
it is done. If any of it fails on any rank, every rank raises, and older checkpoints are untouched.

    sharded=False   rank 0 writes what the ranks share; a rank with state of its own adds a part
    sharded=True    the shared tensors are dealt out by size, and every rank writes its portion

*Load.* From the newest checkpoint to the oldest: the ranks share out the tensors and check each
byte once. The first whole one is taken; each that was refused is logged with its reason. Then every
object is compared with the file, and only when all fit is the first of them changed. The random
generators come last, since loading may draw from them.
"""

from __future__ import annotations

import logging
import operator
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import torch

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.folder import Folder, Place
from dure.checkpoint.manifest import NAME, Manifest, write_manifest
from dure.checkpoint.objects import PerRank, bare, is_sharded, state_of, to_tree, whole_tree
from dure.checkpoint.parts import Entry, dealt_out
from dure.checkpoint.randomness import random_state
from dure.checkpoint.reading import RANDOM, Loading, inspect, write_part
from dure.checkpoint.tree import encode
from dure.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotWritten,
    UsageError,
)

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Checkpointer", "Saved"]

T = TypeVar("T")
_log = logging.getLogger("dure.checkpoint")


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole checkpoint: after which step, where, by how many ranks, how large."""

    step: int
    path: Path
    world_size: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Taken:
    """What one rank has to save."""

    shared: dict[str, Any]
    portions: dict[str, Any]
    """Trees of this rank's part of sharded objects."""
    own: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    """Those that this rank writes."""
    digest: int
    """Of the names, dtypes and shapes of the shared tensors."""


@dataclass(frozen=True, slots=True)
class _Written:
    """What one rank has written, for the manifest."""

    own: dict[str, Any]
    portions: dict[str, Any]
    part: str | None
    entries: list[Entry]


class Checkpointer:
    """Saves a run into a folder, and brings it back.

    Objects are passed by name, the same names to `save` and `load`: modules (wrapped or not),
    optimizers, schedulers, a `GradScaler`, a sampler or `dure.data.DataLoader`, a dict or list,
    anything with ``state_dict`` and ``load_state_dict``. The random generators of all ranks
    are always included.

    Args:
        folder: Where the checkpoints are; made if absent. All ranks must see the same folder. One
            job at a time may save there.
        keep: How many checkpoints to keep; None: all.
        process_group: The ranks that save and load together; None: the default group, or this
            process alone where there is none.
        sharded: Whether all ranks write, instead of rank 0.

    Attributes:
        refused: After `load` or `latest`: path and reason of each checkpoint that was passed over.

    Raises:
        UsageError: `keep` is not positive.

    Collective: `save` and `load` must be called by all ranks of the group.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int | None = 3,
        process_group: ProcessGroup | None = None,
        sharded: bool = False,
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError("a Checkpointer keeps at least one checkpoint", seen=f"keep is {keep}")
        self.keep, self.sharded = keep, sharded
        self.refused: dict[str, str] = {}
        self._folder = Folder(Path(folder))
        self._ranks = Ranks(process_group)

    def save(self, step: SupportsIndex, /, **objects: Any) -> Path:
        """Save `objects` as they are after `step`; return where.

        Returns when the checkpoint is on the disk, on all ranks.

        Raises:
            UsageError: A value in an object cannot be saved; its path is named. Or `step` is no
                whole number from 0 on.
            CheckpointNotWritten: A rank could not write; no rank has saved, older ones are intact.

        Cost: each byte is read and written once; memory: one tensor that is not on the CPU.
        """
        ranks, number = self._ranks, _step_number(step)
        if RANDOM in objects:
            raise UsageError("an object has the name of the random generators", seen=RANDOM)
        for value in objects.values():
            if is_sharded(value) and not self.sharded:
                bare(value).consolidate_state_dict(0)
        taken: list[_Taken] = []

        def take() -> int:
            taken.append(self._take(objects))
            return taken[0].digest

        if len(set(ranks.each(take))) > 1 and self.sharded:
            raise CheckpointError(
                "the ranks hold different objects",
                seen="names, shapes or dtypes of the tensors to be saved differ",
                fix="Pass the same objects on all ranks, or wrap one that differs in PerRank.",
            )
        made: Path | None = None
        try:
            made = ranks.first(lambda: self._writing(lambda: self._folder.begin(number)))
            folder = made
            written = ranks.each(lambda: self._writing(lambda: self._write(folder, taken[0])))
            portions = {n: whole_tree([w.portions[n] for w in written]) for n in taken[0].portions}
            manifest = Manifest(
                step=number,
                objects=taken[0].shared | portions,
                ranks=[w.own for w in written],
                parts={w.part: w.entries for w in written if w.part},
            )
            return ranks.first(lambda: self._writing(lambda: self._commit(folder, manifest)))
        finally:
            if ranks.rank == 0 and made is not None and made.exists():
                self._folder.clean()
            self._folder.release()

    def _take(self, objects: dict[str, Any]) -> _Taken:
        """Turn this rank's objects into trees; choose the tensors that this rank writes."""
        rank, size = self._ranks.rank, self._ranks.size
        shared: dict[str, Any] = {}
        portions: dict[str, Any] = {}
        common: dict[str, torch.Tensor] = {}
        mine: dict[str, torch.Tensor] = {}
        own: dict[str, Any] = {RANDOM: encode(random_state(), RANDOM, {})}
        for name, value in objects.items():
            if isinstance(value, PerRank):
                state = state_of(name, value)
                own[name] = to_tree(name, state, mine, prefix=f"rank{rank}/")
            elif self.sharded and is_sharded(value):
                portions[name] = to_tree(name, state_of(name, value, local=True), mine)
            elif rank == 0 or self.sharded:
                shared[name] = to_tree(name, state_of(name, value), common)
        sizes = {name: t.numel() * t.element_size() for name, t in common.items()}
        owner = dealt_out(sizes, size if self.sharded else 1)
        mine |= {name: tensor for name, tensor in common.items() if owner[name] == rank}
        kinds = [(name, str(t.dtype), tuple(t.shape)) for name, t in sorted(common.items())]
        return _Taken(shared, portions, own, mine, zlib.crc32(repr(kinds).encode()))

    def _writing(self, do: Callable[[], T]) -> T:
        """Do something to the disk; where that fails, say on which rank and that nothing is lost.

        Raises:
            CheckpointNotWritten: It failed.
        """
        try:
            return do()
        except OSError as e:
            raise CheckpointNotWritten(
                "the checkpoint could not be written",
                path=str(self._folder.path),
                rank=self._ranks.rank,
                world_size=self._ranks.size,
                seen=f"{e.strerror or type(e).__name__}: {e.filename or self._folder.path}",
                fix="No rank has saved; checkpoints that were saved before are as they were.",
            ) from e

    def _write(self, folder: Path, taken: _Taken) -> _Written:
        part = f"part-{self._ranks.rank:05d}.safetensors" if taken.tensors else None
        entries = write_part(folder / part, taken.tensors) if part else []
        return _Written(taken.own, taken.portions, part, entries)

    def _commit(self, folder: Path, manifest: Manifest) -> Path:
        write_manifest(folder / NAME, manifest)
        path = self._folder.commit(folder)
        self._prune()
        return path

    def _prune(self) -> None:
        """Remove the oldest whole checkpoints; those that were refused are for a person to see."""
        if self.keep is None:
            return
        places = [p for p in self._folder.places() if str(p.path) not in self.refused]
        for place in places[: -self.keep]:
            try:
                self._folder.remove(place.path)
            except OSError as e:
                _log.warning("checkpoint %s could not be removed: %s", place.path, e)

    def latest(self) -> Saved | None:
        """Return the newest whole checkpoint, or None; this rank alone reads and checks it."""
        self.refused = {}
        for place in reversed(self._places()):
            found = inspect(place, 0, 1)
            if isinstance(found, Manifest):
                return Saved(found.step, place.path, found.world_size, found.num_bytes)
            self._refuse(place, found)
        return None

    def load(self, step: int | None = None, /, **objects: Any) -> int | None:
        """Put `objects` back to the newest whole checkpoint, and return its step.

        Args:
            step: Take the newest checkpoint after this step, instead of the newest of all.
            **objects: All that were saved, or some of them.

        Returns:
            The step; None where nothing was ever saved: begin from the start.

        Raises:
            CheckpointDamaged: There are checkpoints, but none is whole; `refused` says why.
            CheckpointMismatch: The checkpoint is whole, but not of these objects. Nothing is
                changed if it is seen by comparing (names, shapes, dtypes, number of parameters).

        Cost: each byte is read once by one of the ranks to check it, and once by every rank to
        load it; memory: mapped from the file, copied once.
        """
        place, manifest = self._choose(step)
        if place is None or manifest is None:
            return None
        loading = Loading(place.path, manifest, self._ranks.rank, self._ranks.size)
        self._ranks.each(lambda: loading.check(objects))
        self._ranks.each(lambda: loading.load(objects))
        return manifest.step

    def _choose(self, step: int | None) -> tuple[Place | None, Manifest | None]:
        """Find the newest whole checkpoint, on all ranks the same."""
        ranks = self._ranks
        places = ranks.first(self._places)
        wanted = [p for p in reversed(places) if step is None or p.step == step]
        self.refused = {}
        for place in wanted:
            found = self._inspect(place)
            if isinstance(found, Manifest):
                return place, found
            self._refuse(place, found)
        if self.refused:
            raise CheckpointDamaged(
                "there is no whole checkpoint" + ("" if step is None else f" of step {step}"),
                path=str(self._folder.path),
                refused=dict(self.refused),
                seen="; ".join(f"{Path(p).name}: {why}" for p, why in self.refused.items()),
                fix=f"Remove {self._folder.path} to begin from the start.",
            )
        if step is not None:
            raise CheckpointError(
                f"there is no checkpoint of step {step}",
                path=str(self._folder.path),
                seen=f"there are those of steps {[p.step for p in places]}",
            )
        return None, None

    def _inspect(self, place: Place) -> Manifest | str:
        """Return a checkpoint's manifest if all ranks find it whole, else what the first found."""
        found: list[Manifest | str] = []

        def look() -> str:
            found.append(inspect(place, self._ranks.rank, self._ranks.size))
            return found[0] if isinstance(found[0], str) else ""

        faults = [fault for fault in self._ranks.each(look) if fault]
        return faults[0] if faults else found[0]

    def _places(self) -> list[Place]:
        """List what is in the folder, to read from it.

        Raises:
            CheckpointError: It cannot be read.
        """
        try:
            return self._folder.places()
        except OSError as e:
            raise CheckpointError(
                "the checkpoints cannot be listed",
                path=str(self._folder.path),
                seen=e.strerror or type(e).__name__,
                fix="Give a folder that this process may read.",
            ) from e

    def _refuse(self, place: Place, reason: str) -> None:
        self.refused[str(place.path)] = reason
        if self._ranks.rank == 0:
            _log.warning("checkpoint %s is refused: %s", place.path, reason)


def _step_number(step: Any) -> int:
    """Return `step` (Any: what users give) as a number of Python's.

    Raises:
        UsageError: It is none, or negative: such a checkpoint would not be found again.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(
            "a checkpoint's step is a whole number from 0 on",
            seen=f"{step!r:.60}, a {type(step).__name__}",
            fix="Write save(step, model=model, optimizer=optimizer).",
        )
    return number
