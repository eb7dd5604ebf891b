"""Files of checkpoints in local folders: durable writes, and renames that are atomic.

A file is complete under its name, because it is written under a hidden name and renamed
(`replace_file`), or because no manifest names it until it is flushed. A run's checkpoint is a
folder that is renamed the same way; before it is removed, it gets a hidden name again.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dure.checkpoint.files import PIECE_BYTES, write_all
from dure.comm.checksum import copy_from_file
from dure.trace.plain_files import open_plain, read_plain

__all__ = [
    "LocalFile",
    "LocalFiles",
    "Unflushed",
    "check_link",
    "flush",
    "flush_name",
    "make",
    "rename",
    "replace_file",
]

_SAVING, _REMOVING = ".saving-", ".removing-"


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
                errno.ENOTDIR, "it is a file, not a folder", str(folder)
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


class LocalFile:
    """A file that is read through a descriptor.

    Args:
        descriptor: The file, open for reading; closed by `close`.
    """

    piece_bytes = PIECE_BYTES

    def __init__(self, descriptor: int) -> None:
        self.descriptor: int | None = descriptor
        self._open = descriptor

    def num_bytes(self) -> int:
        """Return the length."""
        return os.fstat(self._open).st_size

    def read(self, at: int, count: int) -> bytes:
        """Return bytes from byte `at` on; fewer at the end of the file."""
        parts: list[bytes] = []
        while count and (part := os.pread(self._open, count, at)):  # of 2 GiB at most
            parts.append(part)
            at, count = at + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, data: memoryview, at: int) -> int:
        """Read bytes from byte `at` on; return how many: none at the end of the file."""
        return os.preadv(self._open, [data], at)

    def copy_into(self, data: memoryview, at: int, summed: bool) -> tuple[int, int]:
        """Read large data, or the beginning of it; return how many bytes, and their CRC-32C."""
        return copy_from_file(self._open, at, data, summed)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self.descriptor is not None:
            self.descriptor = None
            os.close(self._open)


class _NewLocalFile:
    """A file that is being written."""

    can_rewrite = True

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: memoryview) -> None:
        write_all(self._descriptor, data)

    def rewrite(self, data: memoryview) -> None:
        write_all(self._descriptor, data, 0)


class LocalFiles:
    """Local folders, as a `file_systems.FileSystem`."""

    make = staticmethod(make)
    check_link = staticmethod(check_link)
    flush = staticmethod(flush)
    flush_name = staticmethod(flush_name)
    replace = staticmethod(replace_file)
    remove_hidden = staticmethod(remove_hidden)

    def number_after(self, last: int) -> int:
        """Return the next number."""
        return last + 1

    def key(self, path: Path) -> str:
        """Return what is equal for two paths of one folder."""
        return os.path.realpath(path)

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder."""
        return os.listdir(folder)

    def size(self, path: Path) -> int:
        """Return the length of a file, a link's own."""
        return path.lstat().st_size

    def open(self, path: Path, follow: bool = False) -> LocalFile:
        """Open a plain file for reading."""
        return LocalFile(open_plain(path, follow=follow))

    def read(self, path: Path, most_bytes: int) -> bytes:
        """Return the bytes of a plain file."""
        return read_plain(path, most_bytes, follow=False)

    @contextmanager
    def new_file(self, path: Path, num_bytes: int) -> Iterator[_NewLocalFile]:
        """Write a new file, which is durable at the end of the block."""
        with path.open("xb", buffering=0) as file:
            yield _NewLocalFile(file.fileno())
            os.fsync(file.fileno())

    def begin(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Make the hidden folder of a new checkpoint; return it, and its later path."""
        made = folder / f"{_SAVING}{name}-{secrets.token_hex(3)}"
        made.mkdir()
        return made, folder / name

    def commit(self, made: Path, final: Path, check: Callable[[], object]) -> None:
        """Give a folder in which all is flushed its name."""
        check()
        rename(made, final)

    def is_checkpoint(self, path: Path) -> bool:
        """Return whether a folder that has a checkpoint's name is one: from its rename on."""
        return True

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint, so that at no moment half of it has a checkpoint's name."""
        hidden = path.with_name(_REMOVING + path.name)
        path.rename(hidden)
        self.remove_tree(hidden)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all in it, as far as possible."""
        shutil.rmtree(path, ignore_errors=True)

    def clean(self, folder: Path, name_of_checkpoint: re.Pattern[str]) -> list[str]:
        """Remove what was never committed, or was being removed; return names of checkpoints."""
        for path in folder.iterdir():
            if path.name.startswith(_REMOVING):
                self.remove_tree(path)
            elif path.name.startswith(_SAVING):
                with suppress(FileNotFoundError):  # it has just been committed
                    self.remove_checkpoint(path)
        return [name for name in os.listdir(folder) if name_of_checkpoint.match(name)]
