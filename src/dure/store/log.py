"""The file store's file: a log of records that only ever grows, and that heals after a crash.

Layout: eight magic bytes, sixteen random ones that are the file's own, then records. A record is
its payload's length and CRC-32 (4 bytes each, little endian) and the payload, msgpack of `Record`.
Whoever reads or writes holds an flock on the file, which the kernel takes away from a process that
dies.

A process killed in the middle of a write leaves a *torn tail*: fewer bytes than announced, or a
checksum that does not fit. The next one to hold the lock cuts it off, which is safe: nobody can be
writing, and nobody has ever read it as a record. Everybody keeps the offset up to which it has
read, so a look at the file costs a `stat` unless there is news.

The file is opened for each use, and its inode and random bytes compared with what they were: a
store whose file was deleted, or replaced, says so instead of talking to itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import msgspec

from dure.errors import StoreError, StoreTimeout

__all__ = ["Log", "Record"]

_MAGIC = b"DURElog1"
_START_BYTES = len(_MAGIC) + 16
_HEAD = struct.Struct("<II")
_OPEN = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in the file's place holds nobody up


class Record(msgspec.Struct, array_like=True, frozen=True):
    """One change: a key set or deleted, or a process that opened or closed the store."""

    kind: Literal["set", "delete", "open", "close"]
    key: str
    value: bytes = b""


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Record).decode


class Log:
    """The records of one file, read on from where this object last stopped.

    Threads: one at a time (the file store's own lock sees to it).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode: tuple[int, int] | None = None
        self._start = b""
        self._offset = 0

    def rewind(self) -> None:
        """Begin again with the first record."""
        self._offset = 0

    def has_news(self) -> bool:
        """Tell, without the lock, whether the file has changed since it was last read."""
        try:
            info = self.path.stat()
        except OSError:
            return True  # `locked` says what is wrong
        return (info.st_dev, info.st_ino) != self._inode or info.st_size != self._offset

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Generator[int]:
        """Hold the file's lock; yields a descriptor for `read`, `write` and `remove`.

        Raises:
            StoreTimeout: Another process held the lock for `timeout_s`.
            StoreError: The file cannot be opened, was deleted or replaced, or is no store.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            fd = self._open()
            try:
                self._lock(fd, deadline)
                if self._is_current(fd):
                    yield fd
                    return
            finally:
                os.close(fd)  # and with it the lock

    def read(self, fd: int) -> list[Record]:
        """Return the records that are new since the last call; cut off a torn tail."""
        self._check_start(fd)
        self._offset = max(self._offset, _START_BYTES)
        size = os.fstat(fd).st_size
        if size < self._offset:
            raise StoreError(
                f"the store's file {self.path} was shortened while the job ran",
                seen=f"{size} bytes, of which {self._offset} had been read",
            )
        data = os.pread(fd, size - self._offset, self._offset)
        records: list[Record] = []
        at = 0
        while (end := _record_end(data, at)) is not None:
            records.append(self._record(data[at + _HEAD.size : end]))
            at = end
        self._offset += at
        if at < len(data):
            os.ftruncate(fd, self._offset)
        return records

    def _record(self, payload: bytes) -> Record:
        try:
            return _unpack(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(
                f"the store's file {self.path} holds a record that is none",
                seen=str(error),
                fix="Use one version of Dure on all hosts, and a new path for each job.",
            ) from None

    def write(self, fd: int, records: list[Record]) -> None:
        """Append records; everything before has been read.

        Raises:
            StoreError: The disk is full or failing; nothing of this call is kept.
        """
        payloads = [_pack(record) for record in records]
        data = b"".join(_HEAD.pack(len(p), zlib.crc32(p)) + p for p in payloads)
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(fd, data[done:], self._offset + done)
        except OSError as error:
            os.ftruncate(fd, self._offset)
            raise StoreError(
                f"the store's file {self.path} cannot be written", seen=error.strerror or ""
            ) from None
        self._offset += len(data)

    def remove(self) -> None:
        """Delete the file; the caller holds the lock."""
        self.path.unlink(missing_ok=True)

    def _open(self) -> int:
        first = self._inode is None
        try:
            fd = os.open(self.path, _OPEN | (os.O_CREAT if first else 0), 0o600)
        except OSError as error:
            raise StoreError(
                f"the store's file {self.path} cannot be opened",
                seen=error.strerror or "",
                fix="Choose a path in a directory that exists and that every rank can write to."
                if first
                else "It was there before: do not delete it while the job runs.",
            ) from None
        try:
            self._check_owner(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_owner(self, file: os.stat_result) -> None:
        """Refuse a file that other users can write to, or have laid out for us.

        In a directory where everybody may make files, such as /tmp, one of another user's is a
        trap. Elsewhere its owner is not looked at: shared file systems show strange ones.
        """
        if not stat.S_ISREG(file.st_mode):
            raise StoreError(f"the store's file {self.path} is not a regular file")
        if file.st_mode & stat.S_IWOTH:
            raise StoreError(
                f"the store's file {self.path} can be written by every user of this machine",
                seen="whoever writes to it takes part in the job",
                fix=f"chmod o-w {self.path}, or choose a new path.",
            )
        everybodys = self.path.parent.stat().st_mode & stat.S_IWOTH
        owners = {file.st_uid, self.path.lstat().st_uid} if everybodys else set[int]()
        if owners - {os.geteuid(), 0}:
            raise StoreError(
                f"the store's file {self.path} belongs to another user",
                seen=f"user {max(owners)}, in a directory where everybody may make files",
                fix="Choose a path in a directory of your own.",
            )

    def _lock(self, fd: int, deadline: float) -> None:
        pause_s = 0.0005
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StoreTimeout(
                        f"another process holds the lock of the store's file {self.path}",
                        fix="It may be stopped: look for it with `fuser` or `lslocks`.",
                    ) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)

    def _is_current(self, fd: int) -> bool:
        """Check that the path still names the locked file; False: it was deleted, open anew."""
        mine = os.fstat(fd)
        inode = (mine.st_dev, mine.st_ino)
        try:
            there = self.path.stat()
        except OSError:
            there = None
        same = there is not None and (there.st_dev, there.st_ino) == inode
        if self._inode is None:
            if same:
                self._inode = inode
            return same
        if same and inode == self._inode:
            return True
        raise self._replaced()

    def _check_start(self, fd: int) -> None:
        """Check the file's first bytes; write them if it is empty, or was torn within them."""
        start = os.pread(fd, _START_BYTES, 0)
        if not start.startswith(_MAGIC[: len(start)]):
            raise StoreError(
                f"the file {self.path} is not a store",
                seen=f"it begins with {start[: len(_MAGIC)]!r}",
                fix="Choose a path that does not exist yet.",
            )
        if len(start) < _START_BYTES:
            start = _MAGIC + secrets.token_bytes(_START_BYTES - len(_MAGIC))
            os.pwrite(fd, start, 0)
        self._start = self._start or start
        if start != self._start:
            raise self._replaced()

    def _replaced(self) -> StoreError:
        return StoreError(
            f"the store's file {self.path} was deleted or replaced while the job ran",
            fix="Give each job a path of its own, and delete it only after the job.",
        )


def _record_end(data: bytes, at: int) -> int | None:
    """Return where the record at `at` ends; None if it is torn, or there is none."""
    if len(data) < at + _HEAD.size:
        return None
    length, checksum = _HEAD.unpack_from(data, at)
    end = at + _HEAD.size + length
    whole = end <= len(data) and zlib.crc32(memoryview(data)[at + _HEAD.size : end]) == checksum
    return end if whole else None
