"""Saving and loading the complete state of a data-parallel run, so that it continues undisturbed.

*Save.* Rank 0 makes a hidden folder; the state is saved there as `save` does it (`saving`); rank 0
renames the folder (the commit, see `folder`); all learn that it is done. If any of it fails on any
rank, every rank raises, and older checkpoints are untouched.

    sharded=False   rank 0 writes what ranks share; a rank with other objects or slices adds a file
    sharded=True    what ranks share is divided by size, and every rank writes its part

Modules, optimizers, and the names in other objects must be the same on all ranks that pass them
(`replicas`), except `PerRank` ones. They are compared before anything is written.

*Load.* From the newest checkpoint to the oldest: the ranks share out the slices and check each
byte once (`resuming`). The first valid one is taken; each that was refused is logged with its
reason. Then every object is compared with the file, and only when all fit is the first of them
changed. The random generators come last, since loading may draw from them.
"""

from __future__ import annotations

import errno
import operator
import os
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, SupportsIndex

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.background import wait_for_saves
from dure.checkpoint.folder import Folder, Place
from dure.checkpoint.fsspec_path import AnyPath, FsspecPath, path_of
from dure.checkpoint.local_files import Unflushed
from dure.checkpoint.lock_records import note_job
from dure.checkpoint.objects import PerRank, Positioned, is_sharded, state_of
from dure.checkpoint.randomness import random_state
from dure.checkpoint.replicas import ReplicaRule, rule_of
from dure.checkpoint.resuming import POSITIONS, RANDOM, RUN, Resuming
from dure.checkpoint.saving import Saving, Taken, take
from dure.comm.profiling import recorded
from dure.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointException,
    CheckpointNotWritten,
    UsageError,
)
from dure.trace import logs

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Checkpointer", "Saved"]

_log = logs.logger("checkpoint")


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint.

    Attributes:
        step: Its step.
        path: Its folder.
        world_size: How many ranks saved it.
        num_bytes: Bytes of its files.

    Obtained from:
        `Checkpointer.save`, `Checkpointer.load` and `Checkpointer.latest`.
    """

    step: int
    path: Path | FsspecPath
    world_size: int
    num_bytes: int


class Checkpointer:
    """Saves a run into a folder, and brings it back.

    Objects are passed by name, the same names to `save` and `load`: modules (wrapped or not),
    optimizers, schedulers, a `GradScaler`, a sampler or `dure.data.DataLoader`, a dict or list,
    anything with ``state_dict`` and ``load_state_dict``. Objects of all ranks must be equal on all
    of them, except buffers of modules, of which rank 0's are saved. Different ones are passed as
    `PerRank`, or under a name of its own, by the ranks that have it. The random generators of all
    ranks are always included.

    Args:
        folder: Where the checkpoints are, a path or a URL of fsspec; made if absent. All ranks
            must see the same folder. One job at a time may save there: from its first save on it
            holds a lock on the folder, until this object or the process ends, however that ends.
            Any job may load.
        keep: How many checkpoints to keep; None: all.
        process_group: The ranks that save and load together; None: the default group at the time
            of the call, or this process alone if there is none then.
        sharded: Whether all ranks write, instead of rank 0.

    Attributes:
        refused: After `load` or `latest`: path and reason of each checkpoint that was passed over.

    Raises:
        UsageError: `keep` is not positive.

    Collective:
        `save` and `load` must be called by all ranks of the group.

    Example:
        ```python
        from dure import checkpoint

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        checkpoints = checkpoint.Checkpointer("runs/mine", keep=2)
        saved = checkpoints.load(model=model, optimizer=optimizer)  # None: nothing was saved so far
        for step in range(0 if saved is None else saved.step + 1, 3):
            checkpoints.save(step, model=model, optimizer=optimizer)
        assert checkpoints.latest().step == 2
        ```
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int | None = 3,
        process_group: ProcessGroup | None = None,
        sharded: bool = False,
    ) -> None:
        if keep is not None and not (isinstance(keep, int) and keep >= 1):
            raise UsageError(
                "a Checkpointer keeps a number of checkpoints, at least one",
                seen=f"keep is {keep!r:.60}",
                fix="What is saved is given to save(), by name.",
            )
        self.keep, self.sharded = keep, sharded
        self.refused: dict[str, str] = {}
        self._folder = Folder(path_of(folder), for_job=True)
        self._process_group = process_group
        _ = self._ranks  # refuses what is no group

    @property
    def _ranks(self) -> Ranks:
        """The ranks now: the default group may have been made after this object."""
        return Ranks(self._process_group)

    @recorded("dure.checkpoint.save")
    def save(self, step: SupportsIndex, /, **objects: Any) -> Path | FsspecPath:
        """Save `objects` as they are after `step`; return where.

        Returns when the checkpoint is on the disk, on all ranks.

        Raises:
            UsageError: A value in an object cannot be saved; its path is named. Or `step` is no
                integer from 0 on.
            CheckpointNotWritten: A rank could not write; no rank has saved, older ones are intact.
                Or the last flush failed: the error says that the new one is in place.
            CheckpointMismatch: Ranks have different objects under one name: names, shapes, dtypes,
                values, or parameters. No rank has saved.

        Cost:
            Each byte is read and written once; memory: one tensor that is not on the CPU.
        """
        ranks = Ranks(self._process_group, "Checkpointer.save")
        number = _step_number(step)
        reserved = objects.keys() & {RANDOM, RUN, POSITIONS, "$"}
        if reserved:
            raise UsageError("an object has a name that is taken", seen=min(reserved))

        def begin() -> tuple[AnyPath, str] | None:
            if ranks.rank != 0:
                self._folder.give_up()
                return None
            return self._folder.begin(number), self._folder.job

        def commit() -> AnyPath:
            path = self._folder.commit(made)
            self._prune()
            return path

        wait_for_saves(self._folder.path)
        committing = False
        try:
            saving = Saving(ranks, lambda: self._taken(number, objects), begin)
            made, job = saving.begun
            note_job(job)
            saving.write(self._folder, made, 1)
            committing = True
            return ranks.first_or_none("the checkpoint was not saved", commit)
        except CheckpointException as e:
            rank, error = min(e.failures), ranks.lowest(e)
        finally:
            self._folder.release()
        try:  # outside the handler: `e` refers to it, and would be its context
            if isinstance(error, OSError):
                raise self._not_written(rank, error, committing) from error
            raise error from error.__cause__
        finally:
            del error  # see `Ranks.decided`

    def _taken(self, step: int, objects: dict[str, Any]) -> Taken:
        """Return what this rank has to save, with what ranks must have in common.

        Modules and optimizers must be equal, except for buffers. Of other objects the names must
        be equal, and values that differ are logged: they may be buffers, or measured by each rank.
        """
        shared: dict[str, Any] = {}
        rules = {RUN: ReplicaRule(values=True)}
        positions = {n: v.own_position() for n, v in objects.items() if isinstance(v, Positioned)}
        own: dict[str, Any] = {RANDOM: random_state(), POSITIONS: positions}
        for name, value in objects.items():
            if isinstance(value, PerRank):
                own[name] = state_of(name, value)
            else:
                shared[name] = state_of(name, value)
                rules[name] = replace(
                    rule_of(name, value, shared[name]),
                    keys=not is_sharded(value),
                    lowest=not self.sharded,
                )
        rank = str(self._ranks.rank)
        run = {"step": step, "ranks": {rank: own}}
        taken = take(shared | {RUN: run}, self._ranks.global_ranks, rules)
        # All ranks have the same tree except for this part, so one of them sends it to rank 0.
        node = taken.tree[RUN]["ranks"].pop(rank)
        return replace(taken, own=((RUN, "ranks", rank), node))

    def _not_written(self, rank: int, error: OSError, committing: bool) -> CheckpointNotWritten:
        what, fix = "the checkpoint could not be written", _fix_of(error)
        if isinstance(error, Unflushed) and committing:
            what = "the checkpoint is in place and complete, but it may not be durable"
            fix = "Check the disk and save again. Checkpoints that were saved before are kept."
        return CheckpointNotWritten(
            what,
            path=str(self._folder.path),
            rank=rank,
            world_size=self._ranks.size,
            seen=f"{error.strerror or type(error).__name__}: {error.filename or self._folder.path}",
            fix=fix,
        )

    def _prune(self) -> None:
        """Remove the oldest valid checkpoints; those that were refused are kept for inspection."""
        if self.keep is None:
            return
        places = [p for p in self._folder.complete if str(p.path) not in self.refused]
        for place in places[: -self.keep]:
            try:
                self._folder.remove(place.path)
            except OSError as e:
                _log.warning("checkpoint %s could not be removed: %s", place.path, str(e))

    def latest(self) -> Saved | None:
        """Return the newest valid checkpoint, or None; this rank alone reads and checks it."""
        self.refused = {}
        for place in reversed(self._places()):
            found = self._opened(place, Ranks(None, alone=True))
            if found is not None:
                return Saved(found.step, found.path, found.world_size, found.catalog.num_bytes)
        return None

    @recorded("dure.checkpoint.load")
    def load(self, step: int | None = None, /, **objects: Any) -> int | None:
        """Put `objects` back to the newest valid checkpoint, and return its step.

        Args:
            step: Load the checkpoint of this step instead of the newest one.
            **objects: All that were saved, or some of them.

        Returns:
            The step; None where nothing was ever saved: begin from the start.

        Raises:
            CheckpointDamaged: There are checkpoints, but none is valid; `refused` says why.
            CheckpointError: A file cannot be opened or read (too many open files, an I/O error),
                or another job has removed the checkpoint during the load. No older checkpoint is
                loaded instead.
            CheckpointTooNew: The newest checkpoint was written by a later version of Dure, whose
                format this one cannot read. No older checkpoint is loaded instead.
            CheckpointMismatch: The checkpoint is valid, but not of these objects. Nothing is
                changed if it is seen by comparing (names, shapes, dtypes, number of parameters).

        Cost:
            Each byte is read once by one of the ranks to check it, and once by every rank to load
            it; memory: mapped from the file, copied once.
        """
        ranks = Ranks(self._process_group, "Checkpointer.load")
        found = self._choose(step, ranks)
        if found is None:
            return None
        ranks.each(lambda: found.check(objects))
        ranks.each(lambda: found.load(objects))
        return found.step

    def _choose(self, step: int | None, ranks: Ranks) -> Resuming | None:
        """Find the newest valid checkpoint, on all ranks the same."""
        places = ranks.first(self._places)
        wanted = [p for p in reversed(places) if step is None or p.step == step]
        self.refused = {}
        for place in wanted:
            found = self._opened(place, ranks)
            if found is not None:
                return found
        if self.refused:
            raise CheckpointDamaged(
                "there is no valid checkpoint" + ("" if step is None else f" of step {step}"),
                path=str(self._folder.path),
                refused=dict(self.refused),
                seen="; ".join(f"{PurePath(p).name}: {why}" for p, why in self.refused.items()),
                fix=f"Remove {self._folder.path} to begin from the start.",
            )
        if step is not None:
            raise CheckpointError(
                f"there is no checkpoint of step {step}",
                path=str(self._folder.path),
                seen=f"there are those of steps {[p.step for p in places]}",
            )
        return None

    def _opened(self, place: Place, ranks: Ranks) -> Resuming | None:
        """Return a checkpoint if all of `ranks` find it valid, else log why it is skipped.

        Raises:
            CheckpointError: A rank could not open or read a file, so nothing is known about it.
        """
        found: list[Resuming] = []
        try:
            ranks.each(lambda: found.append(Resuming(place, ranks)))
        except CheckpointDamaged as e:
            reason = e.seen.removesuffix(f"; in {place.path}")
            self.refused[str(place.path)] = reason
            if self._ranks.rank == 0:
                _log.warning("checkpoint %s is refused: %s", place.path, reason)
            return None
        return found[0]

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


def _fix_of(error: OSError) -> str:
    """Return the advice for an error: the contents of the folder after it, and a fix."""
    left = "No rank has saved; checkpoints that were saved before are as they were."
    if error.errno == errno.EBUSY:
        left += " End the other job, or save into another folder."
    return left


def _step_number(step: Any) -> int:
    """Return `step` as a Python int.

    Raises:
        UsageError: It is none, or negative: such a checkpoint would not be found again.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(
            "a checkpoint's step must be an integer from 0 on",
            seen=f"{step!r:.60}, a {type(step).__name__}",
            fix="Write save(step, model=model, optimizer=optimizer).",
        )
    return number
