"""The file that holds a key: who may have written it, who may read it, and how it is made.

A key is as safe as its file. So before one is believed, everything is looked at that would let
another user read it or put one of his own in its place:

* the file itself: a regular one, of this user (or of root), closed to everybody else. It is looked
  at through the open descriptor, so it cannot be exchanged between the look and the reading;
* its name: a symbolic link must belong to this user or to root, or somebody else chose the file;
* the directory: of this user or of root, and nobody else may write to it, unless it is sticky, as
  /tmp is, where others cannot rename or delete what is not theirs.

It is opened without waiting, for a pipe in its place would hold the job up for ever.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from dure.errors import StoreError

__all__ = ["make_key_file", "read_key_file"]

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def read_key_file(path: Path, most: int) -> bytes:
    """Return what is in a key file, at most `most` bytes of it.

    Raises:
        StoreError: It cannot be read, or another user could have read or written it. The text says
            which command mends that.
    """
    try:
        _check_way(path)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            _check_file(path, os.fstat(fd))
            return os.read(fd, most)
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreError(
            "the job key's file cannot be read",
            seen=f"{path}: {error.strerror}",
            fix="Check the path, and that you may read it.",
        ) from None


def make_key_file(path: Path, key: bytes) -> None:
    """Put `key` into a new file; one that is there already is left as it is.

    It is written to a file of its own and then linked into place: a link either appears whole or,
    if another process was first, fails.

    Raises:
        OSError: The directory cannot be made or written to.
    """
    draft = path.with_name(f".key-{os.getpid()}-{secrets.token_hex(4)}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        try:
            os.write(fd, key)
            os.fsync(fd)
        finally:
            os.close(fd)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _check_file(path: Path, info: os.stat_result) -> None:
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISREG(info.st_mode):
        raise StoreError(
            "the job key's file is not a regular file",
            seen=f"{path} is a {_kind(info.st_mode)}",
            fix="Write the key to a file of mode 600; one that comes through a pipe is for "
            "`dure run --key-stdin`.",
        )
    if info.st_uid not in _trusted():
        raise StoreError(
            "the job key's file belongs to another user",
            seen=f"{path} is user {info.st_uid}'s, and this process user {os.getuid()}'s",
            fix="Make a key file of your own; its owner may know this key, and can exchange it.",
        )
    if mode & _OTHERS:
        raise StoreError(
            "the job key's file is open to other users",
            seen=f"{path} has mode {mode:04o} and belongs to user {info.st_uid}",
            fix=f"Run `chmod 600 {path}`. Who could read the key may still have it: make a new "
            "one if that is not wanted.",
        )


def _check_way(path: Path) -> None:
    """Check that nobody else can choose which file the path means."""
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in _trusted():
        raise StoreError(
            "the job key's file is a symbolic link of another user",
            seen=f"{path} belongs to user {link.st_uid}",
            fix="Give the path of the file itself, in a directory of your own.",
        )
    parent = path.absolute().parent
    info = os.stat(parent)
    writable = info.st_mode & _OTHERS_WRITE and not info.st_mode & stat.S_ISVTX
    if info.st_uid not in _trusted() or writable:
        raise StoreError(
            "other users can exchange the job key's file",
            seen=f"{parent} has mode {stat.S_IMODE(info.st_mode):04o} and belongs to user "
            f"{info.st_uid}",
            fix=f"Run `chmod go-w {parent}`, or keep the key in a directory of your own.",
        )


def _trusted() -> tuple[int, int]:
    """Return the users who can do everything to this process anyway: ourselves, and root."""
    return os.getuid(), 0


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "pipe", stat.S_IFDIR: "directory", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")
