"""The folder of a run's checkpoints: names, the commit, and what is left over.

    000012-step-3000/                 a checkpoint: the 12th that was saved, after step 3000
        part-000001-00000.safetensors
        manifest.json
    .saving-000013-step-3100-5f0c2a/  being written; or left by a run that was killed in it
    .removing-000009-step-2700/       on its way out

A checkpoint is written under a hidden name, which no other save uses. When every file in it is on
the disk, the folder is renamed, and the parent folder flushed: that rename is the commit, and it is
atomic. Removal goes the other way round: renamed first, then emptied. So whatever is killed when, a
folder with a checkpoint's name is a complete one; later changes of its bytes are found by the
checksums.

*Newest* is by the running number, not by the step: a run that was sent back to an older step, and
saves again, continues from there.

One job at a time may save in a folder, since each removes what it considers leftovers, and old
checkpoints. It holds a lock on the folder from its first checkpoint to its end (`lock`). A process
that was stopped after its last look at the lock may continue while the next job saves. Its rename
then fails: the next job has renamed or removed the hidden name before it began.

In a store that fsspec reaches a checkpoint has its final name from its first byte on, and is one if
it has a manifest (`object_store`).
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakSet

from dure.checkpoint.file_systems import file_system_of
from dure.checkpoint.fsspec_path import AnyPath
from dure.checkpoint.lock import FolderLock, give_up, lock_of
from dure.comm.world import is_thread_rank

__all__ = ["Folder", "Place"]

_NAME = re.compile(r"^(\d{6,})-step-(\d+)(-[0-9a-f]{6})?$")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a committed checkpoint lies."""

    number: int
    step: int
    path: AnyPath


class Folder:
    """The checkpoints below `path`. No method communicates.

    Args:
        path: The folder.
        for_job: Whether the lock is held from the first checkpoint on for as long as this object
            exists, instead of during a save.
    """

    def __init__(self, path: AnyPath, for_job: bool = False) -> None:
        self.path = path
        self._files = file_system_of(path)
        self._for_job = for_job
        self._lock: FolderLock | None = None
        self._holds = False
        self._begun: AnyPath | None = None
        self._final = path
        self._complete: list[Place] = []
        _folders.add(self)

    def places(self) -> list[Place]:
        """List the committed checkpoints, oldest first.

        Raises:
            OSError: The folder cannot be read, or is a dangling link; if absent, it is empty.
        """
        before: list[str] = []
        while True:
            try:
                names = sorted(filter(_NAME.match, self._files.names(self.path)))
            except FileNotFoundError:
                self._files.check_link(self.path)
                return []
            places = [self._place(n) for n in names if self._files.is_checkpoint(self.path / n)]
            if places or names == before:
                return sorted(places)
            before = names  # what was listed may be removed since, when a newer one was complete

    def _place(self, name: str) -> Place:
        """Return the checkpoint of a name."""
        found = _NAME.match(name)
        assert found is not None
        return Place(int(found[1]), int(found[2]), self.path / name)

    @property
    def complete(self) -> list[Place]:
        """The checkpoints when this object's last save was committed, oldest first.

        While the lock is held no other process adds one. If a person removes one during the save,
        it is still here.
        """
        return self._complete

    def begin(self, step: int) -> AnyPath:
        """Remove what earlier runs left over, and make the folder of a new checkpoint.

        Until `release` no other save begins there.

        Raises:
            OSError: It cannot be made.
        """
        self._files.make(self.path)
        self.hold()
        self._complete = sorted(map(self._place, self._files.clean(self.path, _NAME)))
        number = max((place.number for place in self._complete), default=0) + 1
        made, self._final = self._files.begin(self.path, f"{number:06d}-step-{step}")
        self._begun = made
        return made

    def hold(self) -> None:
        """Keep other jobs, and other threads of this process, from saving here until `release`.

        Raises:
            OSError: Another job saves here (EBUSY), or the folder cannot be written.
        """
        self.release()
        self._lock = lock_of(self.path)
        self._holds = True  # an interrupt right after the next line does not leave it held
        try:
            self._lock.acquire()
        except BaseException:
            self._holds = False
            raise

    def release(self) -> None:
        """Remove what was begun and not committed, and end the save."""
        if self._begun is not None:
            with suppress(OSError):
                self.check()  # a job that has taken over removes it itself
                self._files.remove_tree(self._begun)
            self._begun = None
        if self._lock is not None and self._holds:
            self._holds = False
            self._lock.release()
        if not self._for_job:
            self._lock = None

    def give_up(self) -> None:
        """Leave the folder to another process of the job, which saves from now on."""
        if not is_thread_rank():  # the lock is that of rank 0, which is in this process
            give_up(self.path)

    @property
    def job(self) -> str:
        """The token of the job that holds the lock, which is this one."""
        assert self._lock is not None
        return self._lock.job

    def forget(self) -> None:
        """In a forked child: leave the lock and what was begun to the parent."""
        self._begun, self._lock, self._holds = None, None, False

    def check(self) -> None:
        """Raise OSError if another job has taken the folder over since `hold`."""
        assert self._lock is not None
        self._lock.check()

    def commit(self, made: AnyPath) -> AnyPath:
        """Make what `begin` returned, in which all is flushed, a checkpoint, durably.

        Raises:
            Unflushed: It is a checkpoint, but the folder cannot be flushed.
            OSError: It cannot be renamed; or another job has taken the folder over.

        In a store it is a checkpoint since its manifest was written.
        """
        final = self._final
        self._files.commit(made, final, self.check)
        self._begun = None
        self._complete.append(self._place(final.name))
        assert self._lock is not None
        self._lock.kept = self._lock.kept or self._for_job
        self._files.flush_name(final)
        return final

    def remove(self, path: AnyPath) -> None:
        """Remove a checkpoint, so that at no moment half of it is taken for one.

        Raises:
            OSError: It cannot be removed; or another job has taken the folder over.
        """
        self.check()
        self._files.remove_checkpoint(path)


_folders: WeakSet[Folder] = WeakSet()


def _forget_all() -> None:
    """In a forked child: saves in progress are the parent's."""
    for folder in _folders:
        folder.forget()


os.register_at_fork(after_in_child=_forget_all)
