"""Reading complete files safely: only regular files of a bounded size, and JSON in them.

Opening a pipe can wait forever for a writer, and a device may have no end. So a file that is read
completely must be a regular file, and not larger than the reader expects.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from typing import Any, NoReturn

__all__ = [
    "NotAFile",
    "open_plain",
    "parse_json",
    "read_plain",
    "release_that_reads",
]

_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_PART_BYTES = 1 << 20
_NEEDS = re.compile(r"dure>=\d{1,4}(\.\d{1,4}){0,3}", re.ASCII)


class NotAFile(OSError):
    """The path exists, but is not a regular file."""


def open_plain(path: str | os.PathLike[str], *, follow: bool = True, pipe: bool = False) -> int:
    """Open a regular file for reading and return the descriptor.

    Args:
        path: The file.
        follow: Whether a symbolic link is followed.
        pipe: Whether it may be a pipe instead. A pipe without a writer reads as empty.

    Raises:
        NotAFile: It is a pipe, a folder, a socket, a device, or a link that is not followed.
        OSError: It does not exist, or cannot be read.
    """
    kind = os.stat(path, follow_symlinks=follow).st_mode
    if not _may_be_read(kind, pipe):
        raise NotAFile(errno.EINVAL, f"is not a regular file but {_named(kind)}", os.fspath(path))
    try:
        descriptor = os.open(path, _OPEN | (0 if follow else os.O_NOFOLLOW))
    except OSError as e:
        if e.errno == errno.ELOOP and not follow:  # replaced since it was checked
            raise NotAFile(
                errno.EINVAL, "is not a regular file but a link", os.fspath(path)
            ) from None
        raise
    try:
        if not _may_be_read(os.fstat(descriptor).st_mode, pipe):
            raise NotAFile(errno.EINVAL, "is not a regular file", os.fspath(path))
        if pipe:
            os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _may_be_read(kind: int, pipe: bool) -> bool:
    return stat.S_ISREG(kind) or (pipe and stat.S_ISFIFO(kind))


def _named(kind: int) -> str:
    kinds = [
        (stat.S_ISLNK, "a link"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISSOCK, "a socket"),
    ]
    return next((name for test, name in kinds if test(kind)), "a device")


def read_plain(
    path: str | os.PathLike[str], most_bytes: int, *, follow: bool = True, pipe: bool = False
) -> bytes:
    """Return the bytes of a regular file, or with `pipe` those of a pipe until its end.

    Raises:
        OSError: As `open_plain`, or the file is larger than `most_bytes`.
    """
    parts: list[bytes] = []
    left = most_bytes + 1
    with os.fdopen(open_plain(path, follow=follow, pipe=pipe), "rb") as file:
        while left and (part := file.read(min(left, _PART_BYTES))):
            parts.append(part)
            left -= len(part)
    if not left:
        size = f"{most_bytes >> 20} MiB" if most_bytes >= 1 << 20 else f"{most_bytes} bytes"
        raise OSError(errno.EFBIG, f"is larger than {size}", os.fspath(path))
    return b"".join(parts)


def parse_json(content: bytes) -> Any:
    """Parse JSON in which all numbers are finite.

    Raises:
        ValueError: It is not such JSON; the message has line and column.
    """
    text = content.decode()

    def refuse(number: str) -> NoReturn:
        raise json.JSONDecodeError(f"{number} is not a finite number", text, text.find(number))

    def finite(number: str) -> float:
        value = float(number)
        return value if abs(value) < float("inf") else refuse(number)

    try:
        return json.loads(text, parse_float=finite, parse_constant=refuse)
    except RecursionError:
        raise json.JSONDecodeError("Nested too deeply", text, 0) from None


def release_that_reads(needs: object, *, older: bool = False) -> str:
    """Return which release reads a file of another format, to complete "install ...".

    Args:
        needs: Content of the file's field `needs`, such as "dure>=0.3"; not trusted.
        older: Whether the format is older than those that this release reads.
    """
    if older:
        return "the release that wrote it; this one does not read older formats"
    if isinstance(needs, str) and _NEEDS.fullmatch(needs):
        return f"a release that reads it: pip install '{needs}'"
    return "the release that wrote it, or a newer one"
