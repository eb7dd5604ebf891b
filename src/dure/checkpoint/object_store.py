"""Files of checkpoints in a store that fsspec reaches: no renames, so the manifest is written last.

- An object appears when its upload is complete, and one that was not completed is never seen. So a
  file of slices is one upload, and so is the manifest of the folder (`replace`).
- A run's checkpoint has its final name from its first byte on: `000012-step-3000-5f0c2a`, a name
  that no other save uses. It is a checkpoint if it has a manifest. Writing that, the last of its
  files, is the commit, and its removal begins with the manifest.
- A writer that was suspended, and has lost its lease, may continue at any time. So no save uses the
  number of another one.
"""

from __future__ import annotations

import errno
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dure.checkpoint.files import MANIFEST
from dure.checkpoint.fsspec_path import FsspecPath

__all__ = ["ObjectStore"]

_REQUEST_BYTES = 8 << 20
"""Of a store: a request takes some 10 ms, however small."""


class _StoredFile:
    """A file in a store: each read is a request for a range of its bytes."""

    piece_bytes = _REQUEST_BYTES
    descriptor: int | None = None

    def __init__(self, path: FsspecPath) -> None:
        self._path = path

    def num_bytes(self) -> int:
        return self._path.size()

    def read(self, at: int, count: int) -> bytes:
        return self._path.read(at, count)

    def read_into(self, data: memoryview, at: int) -> int:
        found = self._path.read(at, len(data))
        data[: len(found)] = found
        return len(found)

    def copy_into(self, data: memoryview, at: int, summed: bool) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        pass


class _Upload:
    """A file that is being uploaded."""

    can_rewrite = False

    def __init__(self, write: Callable[[memoryview], object]) -> None:
        self._write = write

    def write(self, data: memoryview) -> None:
        self._write(data)

    def rewrite(self, data: memoryview) -> None:
        raise OSError(errno.ESPIPE, "an upload cannot be changed")


class ObjectStore:
    """Stores, as a `file_systems.FileSystem`."""

    def number_after(self, last: int) -> int:
        """Return a number that no other save gets, even one that lost its lease and continues."""
        return last + 1 + secrets.randbelow(1 << 20)

    def key(self, path: FsspecPath) -> str:
        """Return the address."""
        return path.url

    def names(self, folder: FsspecPath) -> list[str]:
        """Return the names in a folder; none if it does not exist."""
        return folder.names()

    def size(self, path: FsspecPath) -> int:
        """Return the length of a file."""
        return path.size()

    def open(self, path: FsspecPath, follow: bool = False) -> _StoredFile:
        """Return the file, which need not exist: a read is a request."""
        return _StoredFile(path)

    def read(self, path: FsspecPath, most_bytes: int) -> bytes:
        """Return the bytes of a file."""
        found = path.read(0, most_bytes + 1)
        if len(found) > most_bytes:
            raise OSError(errno.EFBIG, f"is larger than {most_bytes >> 20} MiB", str(path))
        return found

    @contextmanager
    def new_file(self, path: FsspecPath, num_bytes: int) -> Iterator[_Upload]:
        """Upload a file, which appears at the end of the block."""
        with path.uploading(num_bytes) as write:
            yield _Upload(write)

    def replace(
        self,
        path: FsspecPath,
        data: bytes | bytearray,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Replace a file by one upload."""
        check()
        path.write(bytes(data))

    def remove_hidden(self, path: FsspecPath) -> None:
        """Do nothing: an upload that was not completed is not seen."""

    def remove_tree(self, path: FsspecPath) -> None:
        """Remove all files of a folder as far as possible, the manifest first."""
        with suppress(OSError):
            self.remove_checkpoint(path)

    def make(self, folder: FsspecPath) -> None:
        """Make a folder, if the store has folders; NotADirectoryError if there is a file."""
        folder.make()
        if folder.is_file():
            seen = "it is a file, not a folder"
            raise NotADirectoryError(errno.ENOTDIR, seen, folder.url)

    def check_link(self, folder: FsspecPath) -> None:
        """Do nothing: a store has no links."""

    def flush(self, folder: FsspecPath) -> None:
        """Do nothing: files that the store has confirmed are durable."""

    def flush_name(self, path: FsspecPath) -> None:
        """Do nothing."""

    def begin(self, folder: FsspecPath, name: str) -> tuple[FsspecPath, FsspecPath]:
        """Return a path that no other save uses, twice."""
        made = folder / f"{name}-{secrets.token_hex(3)}"
        made.make()
        return made, made

    def commit(self, made: FsspecPath, final: FsspecPath, check: Callable[[], object]) -> None:
        """Do nothing: it is a checkpoint since its manifest was written."""

    def is_checkpoint(self, path: FsspecPath) -> bool:
        """Return whether there is a manifest."""
        return (path / MANIFEST).exists()

    def remove_checkpoint(self, path: FsspecPath) -> None:
        """Remove a checkpoint, the manifest first."""
        (path / MANIFEST).unlink(missing_ok=True)
        path.remove_tree()

    def clean(self, folder: FsspecPath, name_of_checkpoint: re.Pattern[str]) -> list[str]:
        """Remove what has a checkpoint's name and is none; return the names of those that are."""
        complete: list[str] = []
        for name in filter(name_of_checkpoint.match, folder.names()):
            if self.is_checkpoint(folder / name):
                complete.append(name)
            else:
                self.remove_tree(folder / name)
        return complete
