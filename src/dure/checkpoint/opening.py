"""Opening what a checkpoint consists of: files, and nothing that blocks or leads elsewhere.

A name in a folder may be a pipe, whose opening waits for a writer for ever; or a link, whose target
may be anything. Both are refused, as are folders and devices.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["NotAFile", "open_file", "read_file"]


class NotAFile(OSError):
    """There is something of that name, and it is no plain file."""


def open_file(path: Path) -> int:
    """Return a descriptor to read a plain file with.

    Raises:
        NotAFile: It is a link, a pipe, a folder, a socket, or a device.
        OSError: It is not there, or may not be read.
    """
    kind = path.lstat().st_mode
    if not stat.S_ISREG(kind):
        raise NotAFile(0, f"is no file but {_named(kind)}", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # replaced since it was looked at
        os.close(descriptor)
        raise NotAFile(0, "is no file", str(path))
    return descriptor


def _named(kind: int) -> str:
    kinds = [
        (stat.S_ISLNK, "a link"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISSOCK, "a socket"),
    ]
    return next((name for test, name in kinds if test(kind)), "a device")


def read_file(path: Path) -> bytes:
    """Return the bytes of a plain file; errors as `open_file`."""
    with os.fdopen(open_file(path), "rb") as file:
        return file.read()
