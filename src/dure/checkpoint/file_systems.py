"""Where the files of checkpoints are: local folders, or a store that fsspec reaches.

All that a checkpoint needs of the place of its files is a `FileSystem`:

    open, read, names, size      read ranges of a file, or all of it; list
    new_file                     write a file that no other save writes
    replace                      the commit of a folder: its manifest, complete or as it was before
    begin, commit,               a run's checkpoint appears complete, and disappears at once; the
    remove_checkpoint, clean     leftovers of killed saves are removed
    make, check_link, flush      folders, and that they are durable

`LocalFiles` renames files and folders, after it has flushed them. `ObjectStore` has no renames: an
object appears when it is complete, and the manifest is written last. Which of the two it is, only
`file_system_of` asks, and the lock on a folder (`lock`, `lease`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from dure.checkpoint.files import MOST_BYTES
from dure.checkpoint.fsspec_path import AnyPath, FsspecPath
from dure.checkpoint.local_files import LocalFiles
from dure.checkpoint.object_store import ObjectStore

__all__ = [
    "FileSystem",
    "NewFile",
    "OpenFile",
    "file_system_of",
    "names_in",
    "open_file",
    "read_file",
]


class OpenFile(Protocol):
    """A file that is open for reading, by several threads at once."""

    @property
    def piece_bytes(self) -> int:
        """How much to read at once."""
        ...

    @property
    def descriptor(self) -> int | None:
        """What a local file can be mapped with; None: it cannot."""
        ...

    def num_bytes(self) -> int:
        """Return the length."""
        ...

    def read(self, at: int, count: int) -> bytes:
        """Return bytes from byte `at` on; fewer at the end of the file."""
        ...

    def read_into(self, data: memoryview, at: int) -> int:
        """Read bytes from byte `at` on; return how many: none at the end of the file."""
        ...

    def copy_into(self, data: memoryview, at: int, summed: bool) -> tuple[int, int]:
        """Read large data, or the beginning of it; return how many bytes, and their CRC-32C."""
        ...

    def close(self) -> None:
        """Close the file; may be called twice."""
        ...


class NewFile(Protocol):
    """A file that is being written, from its first byte to its last."""

    @property
    def can_rewrite(self) -> bool:
        """Whether bytes that were written can be replaced."""
        ...

    def write(self, data: memoryview) -> None:
        """Write the next bytes."""
        ...

    def rewrite(self, data: memoryview) -> None:
        """Replace the first bytes, if `can_rewrite`."""
        ...


class FileSystem(Protocol):
    """Local folders, or a store.

    Raises:
        OSError: Any method, if it fails; FileNotFoundError if a file is absent.
    """

    def number_after(self, last: int) -> int:
        """Return the number of the next save, if files of saves up to `last` are in the folder."""
        ...

    def key(self, path: Any) -> str:
        """Return what is equal for two paths of one folder."""
        ...

    def names(self, folder: Any) -> list[str]:
        """Return the names in a folder."""
        ...

    def size(self, path: Any) -> int:
        """Return the length of a file, a link's own."""
        ...

    def open(self, path: Any, follow: bool = False) -> OpenFile:
        """Open a plain file for reading; one in a store is looked for when it is read.

        Args:
            path: The file.
            follow: Whether a link is followed.

        Raises:
            NotAFile: It is a link, a pipe, a folder, a socket, or a device.
        """
        ...

    def read(self, path: Any, most_bytes: int) -> bytes:
        """Return the bytes of a plain file; errors as `open`, or it is larger than `most_bytes`."""
        ...

    def new_file(self, path: Any, num_bytes: int) -> AbstractContextManager[NewFile]:
        """Write a new file, which is complete and durable at the end of the block.

        Args:
            path: The file; FileExistsError if there is one.
            num_bytes: How long it will be.
        """
        ...

    def replace(
        self, path: Any, data: bytes | bytearray, check: Callable[[], object] = ...
    ) -> None:
        """Create or replace a file, completely and durably, or not at all.

        Args:
            path: The file.
            data: Its new content.
            check: Called right before it is in place; an error of it prevents that.

        Raises:
            Unflushed: It is in place, but the folder cannot be flushed.
        """
        ...

    def remove_hidden(self, path: Any) -> None:
        """Remove what `replace` has left of a file: the process was killed, or is stopped."""
        ...

    def remove_tree(self, path: Any) -> None:
        """Remove a folder and all in it, as far as possible."""
        ...

    def make(self, folder: Any) -> None:
        """Make a folder and those above it, durably."""
        ...

    def check_link(self, folder: Any) -> None:
        """Raise NotADirectoryError if a folder, or one above it, is a dangling link."""
        ...

    def flush(self, folder: Any) -> None:
        """Make the names in a folder durable."""
        ...

    def flush_name(self, path: Any) -> None:
        """Make a new name durable; Unflushed if that fails."""
        ...

    def begin(self, folder: Any, name: str) -> tuple[Any, Any]:
        """Make the folder of a new checkpoint; return its path, and that after the commit."""
        ...

    def commit(self, made: Any, final: Any, check: Callable[[], object]) -> None:
        """Make what `begin` returned a checkpoint, if its manifest has not done that.

        Args:
            made: The folder, in which all is flushed.
            final: Its path after the commit.
            check: Called before; an error of it prevents the commit.
        """
        ...

    def is_checkpoint(self, path: Any) -> bool:
        """Return whether a folder that has a checkpoint's name is one."""
        ...

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, so that at no moment half of it is taken for one."""
        ...

    def clean(self, folder: Any, name_of_checkpoint: re.Pattern[str]) -> list[str]:
        """Remove what was never committed, and what was being removed; return the names of others.

        Args:
            folder: The folder of the checkpoints.
            name_of_checkpoint: Matches the names of checkpoints.
        """
        ...


_LOCAL, _STORE = LocalFiles(), ObjectStore()


def file_system_of(path: AnyPath) -> FileSystem:
    """Return what handles a path."""
    return cast(FileSystem, _STORE if isinstance(path, FsspecPath) else _LOCAL)


def open_file(path: AnyPath, follow: bool = False) -> OpenFile:
    """Open a plain file for reading; arguments and errors as `FileSystem.open`."""
    return file_system_of(path).open(path, follow)


def read_file(path: AnyPath) -> bytes:
    """Return the bytes of a plain file; errors as `open_file`, or it is larger than 1 GiB."""
    return file_system_of(path).read(path, MOST_BYTES)


def names_in(folder: AnyPath) -> list[str]:
    """Return the names in a folder; OSError if it cannot be read."""
    return file_system_of(folder).names(folder)
