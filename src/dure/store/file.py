"""The file store: for ranks that share a file system and nothing else.

The file is a log: a line that names the file, then one line for each write, and one for
each process that opens the store or closes it. Readers and writers hold an flock on it, which the
kernel takes away from a process that dies. Every process carries out the writes on a board of its
own, which it brings up to date before each operation. A waiter looks again after 1 ms, then ever
more rarely, at most 20 ms apart.

A process killed in the middle of a write leaves a line without an end. The next one to hold the
lock cuts it off, which is safe: no process can be writing, and none has read it.

The last process to close the store removes the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
import uuid
import weakref
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path

import msgspec

from dure.errors import DureError, StoreError, StoreTimeout
from dure.store.arguments import integer_of
from dure.store.asking import AskingStore
from dure.store.base import DEFAULT_TIMEOUT
from dure.store.board import Board
from dure.store.builds import SAME_BUILD, Build, differing, own_build
from dure.store.identity import Identity, alive, myself
from dure.store.wire import WRITES, Reply, Request

__all__ = ["FileStore"]

_GOODBYE = timedelta(seconds=1)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
_MAGIC = b"dure store "
_HEAD_BYTES = len(_MAGIC) + 33  # with the file's own name and the end of the line
_OPEN = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in the file's place blocks no one
_ME = b"this process"


class _Line(msgspec.Struct, array_like=True, frozen=True):
    """One line of the file: a write, the opening of the store by a process, or its closing.

    Every version reads it, so fields are only appended.
    """

    write: Request | None = None
    user: str = ""  # of builds before 0.2.0
    process: Identity | None = None
    build: Build | None = None


_pack = msgspec.json.Encoder().encode
_unpack = msgspec.json.Decoder(_Line).decode


class FileStore(AskingStore):
    """A store in a file that all ranks can open, on one host or on a shared file system with locks.

    Args:
        file_name: The file; it is made if it is not there. Its directory must exist.
        world_size: How many stores will open the file: the last of them to close deletes it.
            -1: the file stays.
        timeout: How long `get`, `wait` and getting the lock wait.
        fresh: Whether to begin without keys if all processes that used the file have closed it.

    Raises:
        StoreError: The file cannot be opened, or is not a store.

    Threads: any number may use one store. A forked child may use it too; only the process that
    made the store closes it.
    """

    def __init__(
        self,
        file_name: str | os.PathLike[str],
        world_size: int = -1,
        timeout: timedelta = DEFAULT_TIMEOUT,
        fresh: bool = False,
    ) -> None:
        super().__init__(timeout)
        self._world_size = integer_of(world_size, "FileStore", "world_size")
        self._log = _Log(Path(file_name).absolute())
        self._pid = os.getpid()
        self._closed = True
        self.start_afresh()
        with self._locked() as fd:
            if fresh and self._is_left_by_all() and not any(map(_may_live, self._users)):
                self._read_again()
                self._log.clear(fd)
            self._log.append(fd, _Line(process=myself(), build=own_build()))
            self._users.append(myself())
        self._closed = False
        _stores.add(self)

    @property
    def path(self) -> str:
        """The file's path."""
        return str(self._log.path)

    def clone(self) -> FileStore:
        return FileStore(self.path, self._world_size, self._timeout)

    def close(self) -> None:
        """Say that this process is done; the last of `world_size` deletes the file.

        A file that was deleted already is not an error here.
        """
        if self._closed or self._pid != os.getpid():
            return
        try:
            with self._mutex, self._locked() as fd:
                self._num_closed += 1
                if self._is_left_by_all() and 0 < self._world_size <= self._num_closed:
                    self._log.path.unlink(missing_ok=True)
                else:
                    self._log.append(fd, _Line())
        except StoreTimeout:
            raise
        except StoreError:
            pass
        finally:
            self._closed = True

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.set_timeout(_GOODBYE)
            with contextlib.suppress(DureError):
                self.close()

    def start_afresh(self) -> None:
        """In a forked child: another thread of the parent may have been in the middle of it all."""
        self._mutex = threading.Lock()
        self._read_again()

    def _read_again(self) -> None:
        self._log.rewind()
        self._board = Board()
        self._users: list[Identity] = []  # that opened the store, also those that closed it
        self._num_closed = 0

    def _is_left_by_all(self) -> bool:
        return self._num_closed == len(self._users)

    @contextlib.contextmanager
    def _locked(self) -> Generator[int]:
        """Hold the file's lock, with all that is new in it carried out; yields its descriptor."""
        with self._log.locked(self._timeout.total_seconds()) as fd:
            for line in self._log.read(fd):
                if line.write is not None:
                    self._board.handle(_ME, line.write, 0.0)
                elif line.process is not None:
                    self._users.append(line.process)
                else:
                    self._num_closed += 1
            yield fd

    @property
    def _named(self) -> str:
        return f"the store in {self.path}"

    def _answered(self, request: Request, patience_s: float) -> Reply | None:
        deadline, pause_s = time.monotonic() + request.timeout_s, _FIRST_PAUSE_S
        at_once = msgspec.structs.replace(request, timeout_s=0.0)
        while True:
            with self._mutex:
                reply = self._handle(at_once)
            left_s = deadline - time.monotonic()
            if reply.status != "timeout" or left_s <= 0:
                return reply
            time.sleep(min(pause_s, left_s))
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    def _handle(self, request: Request) -> Reply:
        if self._closed:
            raise StoreError(f"{self._named} was closed by this process")
        if request.op in WRITES:
            with self._locked() as fd:
                reply = self._board.handle(_ME, request, 0.0)[0][1]
                try:
                    self._log.append(fd, _Line(request))
                except StoreError:
                    self._read_again()
                    raise
                return reply
        if self._log.has_news():
            with self._locked():
                pass
        return self._board.handle(_ME, request, 0.0)[0][1]


def _builds_of(lines: bytes) -> str:
    """Return a sentence about the builds that opened the store, if they differ."""
    found: list[tuple[Build, object]] = [(own_build(), myself())]
    for line in lines.splitlines():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            opens = _unpack(line)
            if opens.process is not None:
                found.append((opens.build or Build(), opens.process))
    seen = differing(found)
    return f"It was opened by different ones: {seen}. " if seen else ""


def _may_live(process: Identity) -> bool:
    return alive(process) is not False


class _Log:
    """The lines of one file, read on from where this object last stopped.

    The file is opened for each use, and its first line compared with what it was: a store whose
    file was deleted, or replaced, reports that instead of talking to itself.

    Threads: one at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._head = b""
        self._offset = self._inode = 0

    def rewind(self) -> None:
        """Begin again with the first line."""
        self._offset = 0

    def clear(self, fd: int) -> None:
        """Delete all lines but the first."""
        self._offset = _HEAD_BYTES
        os.ftruncate(fd, self._offset)

    def has_news(self) -> bool:
        """Tell, without the lock, whether the file has changed since it was last read."""
        try:
            info = self.path.stat()
        except OSError:
            return True  # `locked` raises the error
        return (info.st_ino, info.st_size) != (self._inode, self._offset)

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Generator[int]:
        """Hold the file's lock; yields a descriptor for `read` and `append`.

        Raises:
            StoreTimeout: Another process held the lock for `timeout_s`.
            StoreError: The file cannot be opened, was deleted or replaced, or is no store.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            fd = self._open()
            try:
                self._lock(fd, deadline)
                if self._is_at_path(fd):
                    self._check_head(fd)
                    yield fd
                    return
            finally:
                os.close(fd)  # and with it the lock

    def read(self, fd: int) -> list[_Line]:
        """Return the lines that are new since the last call; cut off one that has no end."""
        self._offset = max(self._offset, _HEAD_BYTES)
        size = os.fstat(fd).st_size
        if size < self._offset:
            raise StoreError(
                f"the store's file {self.path} was shortened while the job ran",
                seen=f"{size} bytes, of which {self._offset} had been read",
            )
        whole, end, torn = os.pread(fd, size - self._offset, self._offset).rpartition(b"\n")
        try:
            lines = [_unpack(line) for line in whole.splitlines()]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(
                f"the store's file {self.path} holds a line that cannot be understood",
                seen=str(error),
                fix=f"{SAME_BUILD} {_builds_of(whole)}Choose a new path for each job.",
            ) from None
        self._offset += len(whole + end)
        if torn:
            os.ftruncate(fd, self._offset)
        return lines

    def append(self, fd: int, line: _Line) -> None:
        """Add a line; everything before has been read.

        Raises:
            StoreError: The disk is full or failing; nothing of this line is kept.
        """
        data = _pack(line) + b"\n"
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

    def _open(self) -> int:
        first = not self._head
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

        In a directory where every user may make files, such as /tmp, one of another user's is a
        trap. Elsewhere its owner is not looked at: shared file systems show strange ones.
        """
        if not stat.S_ISREG(file.st_mode):
            raise StoreError(f"the store's file {self.path} is not a regular file")
        if file.st_mode & stat.S_IWOTH:
            raise StoreError(
                f"the store's file {self.path} can be written by every user of this machine",
                seen="a user who writes to it takes part in the job",
                fix=f"chmod o-w {self.path}, or choose a new path.",
            )
        everybodys = self.path.parent.stat().st_mode & stat.S_IWOTH
        owners = {file.st_uid, self.path.lstat().st_uid} if everybodys else set[int]()
        if owners - {os.geteuid(), 0}:
            raise StoreError(
                f"the store's file {self.path} belongs to another user",
                seen=f"user {max(owners)}, in a directory where every user may make files",
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

    def _is_at_path(self, fd: int) -> bool:
        """Tell whether the locked file is still there; else it was deleted before we had it."""
        self._inode = os.fstat(fd).st_ino
        try:
            return self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def _check_head(self, fd: int) -> None:
        """Check the file's first line; write it if the file is empty, or was torn within it."""
        head = os.pread(fd, _HEAD_BYTES, 0)
        if not head.startswith(_MAGIC[: len(head)]):
            raise StoreError(
                f"the file {self.path} is not a store",
                seen=f"it begins with {head[: len(_MAGIC)]!r}",
                fix="Choose a path that does not exist yet.",
            )
        if len(head) < _HEAD_BYTES:
            head = _MAGIC + uuid.uuid4().hex.encode() + b"\n"
            os.pwrite(fd, head, 0)
        self._head = self._head or head
        if head != self._head:
            raise StoreError(
                f"the store's file {self.path} was deleted or replaced while the job ran",
                fix="Give each job a path of its own, and delete it only after the job.",
            )


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


def _start_afresh() -> None:
    for store in list(_stores):
        store.start_afresh()


os.register_at_fork(after_in_child=_start_afresh)
