"""The folder of a run's checkpoints: names, the commit, and what is left over.

    000012-step-3000/                 a checkpoint: the 12th that was saved, after step 3000
        part-000001-00000.safetensors
        manifest.json
    .saving-000013-step-3100/         being written; or left by a run that was killed in it
    .removing-000009-step-2700/       on its way out

A checkpoint is written under a hidden name. When every file in it is on the disk, the folder is
renamed, and the parent folder flushed: that rename is the commit, and it is atomic. Removal goes
the other way round: renamed first, then emptied. So whatever is killed when, a folder with a
checkpoint's name is a complete one; what its bytes became since is for the checksums to say.

*Newest* is by the running number, not by the step: a run that was sent back to an older step, and
saves again, continues from there.

One job at a time may save in a folder, since each removes what it takes for left over. It holds a
lock on the folder meanwhile, which ends with its process; a file system may know no locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

__all__ = ["Folder", "Place", "flush", "make", "replace_file"]

_NAME = re.compile(r"^(\d{6,})-step-(\d+)$")
_SAVING, _REMOVING = ".saving-", ".removing-"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a committed checkpoint lies."""

    number: int
    step: int
    path: Path


class Folder:
    """The checkpoints below `path`. No method communicates."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._begun: Path | None = None
        _folders.add(self)

    def places(self) -> list[Place]:
        """List the committed checkpoints, oldest first.

        Raises:
            OSError: The folder cannot be read; one that is absent is empty.
        """
        try:
            names = [(p, _NAME.match(p.name)) for p in self.path.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(Place(int(m[1]), int(m[2]), p) for p, m in names if m)

    def begin(self, step: int) -> Path:
        """Remove what earlier runs left over, and make the hidden folder of a new checkpoint.

        Until `release` no other process can.

        Raises:
            OSError: It cannot be made.
        """
        make(self.path)
        self.hold()
        self.clean()
        number = max((place.number for place in self.places()), default=0) + 1
        made = self.path / f"{_SAVING}{number:06d}-step-{step}"
        made.mkdir()
        self._begun = made
        return made

    def hold(self) -> None:
        """Let nobody else save here until `release`.

        Raises:
            OSError: Somebody does.
        """
        self.release()
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise OSError(errno.EBUSY, "another job is saving there", str(self.path)) from None
        except OSError:
            return  # a file system without locks

    def release(self) -> None:
        """Remove what was begun and not committed, and let others save here."""
        if self._begun is not None:
            shutil.rmtree(self._begun, ignore_errors=True)
            self._begun = None
        if self._lock is not None:
            with suppress(OSError):  # a file system without locks
                # Closing alone would leave it to the copies that forked children have.
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def forget(self) -> None:
        """Close this process's copy of the lock, and leave the lock and what was begun alone."""
        self._begun = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def commit(self, made: Path) -> Path:
        """Make what `begin` returned, in which all is flushed, a checkpoint, durably.

        Raises:
            OSError: It cannot be renamed or flushed.
        """
        final = made.with_name(made.name.removeprefix(_SAVING))
        made.rename(final)
        flush(self.path)
        return final

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, so that at no moment half of it has a checkpoint's name."""
        hidden = path.with_name(_REMOVING + path.name)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def clean(self) -> None:
        """Remove what was never committed, and what was being removed."""
        for path in self.path.iterdir():
            if path.name.startswith((_SAVING, _REMOVING)):
                shutil.rmtree(path, ignore_errors=True)


_folders: WeakSet[Folder] = WeakSet()


def _forget_all() -> None:
    """In a forked child: the locks are the parent's, and end with it although the child lives."""
    for folder in _folders:
        folder.forget()


os.register_at_fork(after_in_child=_forget_all)


def make(folder: Path) -> None:
    """Make a folder and those above it, durably."""
    if folder.is_dir():
        return
    make(folder.parent)
    folder.mkdir(exist_ok=True)
    flush(folder.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Make a file, or another in its place, whole and durably: written beside it and renamed.

    Raises:
        OSError: It cannot be written; what was there before is.
    """
    hidden = path.with_name(_SAVING + path.name)
    hidden.unlink(missing_ok=True)
    with hidden.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    flush(path.parent)
    hidden.rename(path)
    flush(path.parent)


def flush(folder: Path) -> None:
    """Flush the names in a folder to the disk; OSError where that fails."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
