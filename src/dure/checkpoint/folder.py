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
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

from dure.checkpoint.lock import FolderLock, give_up, lock_of
from dure.comm.world import is_thread_rank

__all__ = [
    "Folder",
    "Place",
    "Unflushed",
    "check_link",
    "flush",
    "flush_name",
    "make",
    "remove_hidden",
    "rename",
    "replace_file",
]

_NAME = re.compile(r"^(\d{6,})-step-(\d+)$")
_SAVING, _REMOVING = ".saving-", ".removing-"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a committed checkpoint lies."""

    number: int
    step: int
    path: Path


class Folder:
    """The checkpoints below `path`. No method communicates.

    Args:
        path: The folder.
        for_job: Whether the lock is held from the first checkpoint on for as long as this object
            exists, instead of during a save.
    """

    def __init__(self, path: Path, for_job: bool = False) -> None:
        self.path = path
        self._for_job = for_job
        self._lock: FolderLock | None = None
        self._holds = False
        self._begun: Path | None = None
        self._final = path
        _folders.add(self)

    def places(self) -> list[Place]:
        """List the committed checkpoints, oldest first.

        Raises:
            OSError: The folder cannot be read, or is a dangling link; if absent, it is empty.
        """
        try:
            names = [(p, _NAME.match(p.name)) for p in self.path.iterdir()]
        except FileNotFoundError:
            check_link(self.path)
            return []
        return sorted(Place(int(m[1]), int(m[2]), p) for p, m in names if m)

    def begin(self, step: int) -> Path:
        """Remove what earlier runs left over, and make the hidden folder of a new checkpoint.

        Until `release` no other save begins there.

        Raises:
            OSError: It cannot be made.
        """
        make(self.path)
        self.hold()
        self.clean()
        number = max((place.number for place in self.places()), default=0) + 1
        name = f"{number:06d}-step-{step}"
        made = self.path / f"{_SAVING}{name}-{secrets.token_hex(3)}"
        made.mkdir()
        self._begun, self._final = made, self.path / name
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
                shutil.rmtree(self._begun, ignore_errors=True)
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

    def commit(self, made: Path) -> Path:
        """Make what `begin` returned, in which all is flushed, a checkpoint, durably.

        Raises:
            Unflushed: It is renamed, but the folder cannot be flushed.
            OSError: It cannot be renamed; or another job has taken the folder over.
        """
        self.check()
        final = self._final
        rename(made, final)
        assert self._lock is not None
        self._lock.kept = self._lock.kept or self._for_job
        flush_name(final)
        return final

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, so that at no moment half of it has a checkpoint's name."""
        hidden = path.with_name(_REMOVING + path.name)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def clean(self) -> None:
        """Remove what was never committed, and what was being removed."""
        for path in self.path.iterdir():
            if path.name.startswith(_REMOVING):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(_SAVING):
                with suppress(FileNotFoundError):  # it has just been committed
                    self.remove(path)


_folders: WeakSet[Folder] = WeakSet()


def _forget_all() -> None:
    """In a forked child: saves in progress are the parent's."""
    for folder in _folders:
        folder.forget()


os.register_at_fork(after_in_child=_forget_all)


def make(folder: Path) -> None:
    """Make a folder and those above it, durably.

    Raises:
        OSError: It cannot be made; a dangling link, or a file in its place, is named.
    """
    if folder.is_dir():
        return
    check_link(folder)
    make(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(
                errno.ENOTDIR, "there is something else than a folder", str(folder)
            ) from None
    flush(folder.parent)


def check_link(folder: Path) -> None:
    """Raise NotADirectoryError if a folder, or one above it, is a dangling link.

    The disk may not be mounted: such a folder is not empty, and must not be created.
    """
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            seen = f"a link to {os.readlink(path)}, which does not exist"
            raise NotADirectoryError(errno.ENOTDIR, seen, str(path))


def replace_file(
    path: Path, data: bytes | bytearray, check: Callable[[], object] = lambda: None
) -> None:
    """Create or replace a file, completely and durably: written under another name and renamed.

    Args:
        path: The file.
        data: Its new content.
        check: Called right before the rename; an error of it prevents that.

    Raises:
        Unflushed: It is in place, but the folder cannot be flushed.
        OSError: It cannot be written; the previous file is unchanged, except as `rename`.
    """
    hidden = path.with_name(f"{_SAVING}{path.name}-{secrets.token_hex(3)}")
    try:
        with hidden.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        flush(path.parent)
        check()
        rename(hidden, path)
    except BaseException:
        with suppress(OSError):
            hidden.unlink(missing_ok=True)
        raise
    flush_name(path)


def rename(old: Path, new: Path) -> None:
    """Rename a file, which replaces another one, or a folder.

    A network file system may report an error for a rename that took effect: the server's answer is
    lost, the request is sent again, and the old name is gone. So after an error the new name is
    looked at, and if it is that of the file, there is none.

    Raises:
        OSError: It was not renamed; or that cannot be found out, as the new name cannot be opened.
    """
    descriptor = os.open(old, os.O_RDONLY)  # while it is open no other file gets its number
    try:
        try:
            old.rename(new)
        except OSError:
            if not _is_at(new, descriptor):
                raise
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether a path is that of an open file; opening it asks the server."""
    try:
        there = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.path.samestat(os.fstat(there), os.fstat(descriptor))
    finally:
        os.close(there)


def remove_hidden(path: Path) -> None:
    """Remove what `replace_file` has left of a file: the process was killed, or is stopped."""
    for name in os.listdir(path.parent):
        if name.startswith(_SAVING + path.name):
            path.with_name(name).unlink(missing_ok=True)


class Unflushed(OSError):
    """What was saved is in place, but a power failure may undo it."""


def flush_name(path: Path) -> None:
    """Flush the folder in which a file or folder got its name.

    Raises:
        Unflushed: That fails.
    """
    try:
        flush(path.parent)
    except OSError as e:
        seen = f"{e.strerror}, when the folder was flushed after the rename to {path.name}"
        raise Unflushed(e.errno, seen, str(path.parent)) from e


def flush(folder: Path) -> None:
    """Flush the names in a folder to the disk; OSError where that fails."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
