"""The file store: for ranks that share a file system and nothing else.

The file is a log: a first line that says what it is, then one line for each write, and one for each
process that opens the store or closes it. Readers and writers hold an flock on it, which the kernel
takes away from a process that dies. Every process carries out the writes on a board of its own,
which it brings up to date before each operation. A waiter looks again after 1 ms, then ever more
rarely, at most 20 ms apart.

A process killed in the middle of a write leaves a line without an end. The next one to hold the
lock cuts it off, which is safe: no process can be writing, and none has read it.

The last process to close the store removes the file. A rendezvous clears one whose users have died.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
import weakref
from collections import Counter
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path

import msgspec

from dure.errors import DureError, StoreError, StoreTimeout
from dure.store.arguments import integer_of
from dure.store.asking import AskingStore
from dure.store.base import DEFAULT_TIMEOUT
from dure.store.board import Board
from dure.store.builds import SAME_BUILD
from dure.store.identity import Identity, alive, myself
from dure.store.wire import WRITES, Reply, StoreRequest

__all__ = ["FileStore"]

_GOODBYE = timedelta(seconds=1)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
_MAGIC = b"dure store 2\n"
_OPEN = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in the file's place blocks no one
_ME = b"this process"


class _Line(msgspec.Struct, array_like=True, frozen=True):
    """One line of the file: a write, or the opening or closing of the store by a process."""

    write: StoreRequest | None = None
    process: Identity | None = None
    closes: bool = False


_pack = msgspec.json.Encoder().encode
_unpack = msgspec.json.Decoder(_Line).decode


class FileStore(AskingStore):
    """A store in a file that all ranks can open, on one host or on a shared file system with locks.

    Args:
        file_name: The file; it is made if absent. Its directory must exist.
        world_size: How many stores will open the file: the last of them to close deletes it.
            -1: the file stays.
        timeout: How long `get`, `wait` and getting the lock wait.
        fresh: Whether to begin without keys if all processes that have not closed the file, or all
            that have used it, are known to have died.

    Raises:
        StoreError: The file cannot be opened, or is not a store.

    Threads:
        Any number may use one store. A forked child may use it too; only the process that made the
        store closes it.

    Example:
        ```python
        store = dist.FileStore("shared.keys", world_size=2)  # both ranks open the file
        store.set(f"ready{dist.get_rank()}", "yes")
        store.wait(["ready0", "ready1"])
        dist.barrier()
        store.close()
        ```
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
        self._pid, self._closed = os.getpid(), True
        self.start_afresh()
        try:
            with self._locked():
                # Late ranks still read why the others, which have closed it but live, did not meet.
                users = [process for process, opened in self._users.items() if opened > 0]
                if fresh and all(alive(user) is False for user in users or self._users):
                    self._read_again()
                    self._log.clear()
                self._note(_Line(process=myself()))
        except BaseException:
            self._log.close()
            raise
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
            with self._mutex, self._locked():
                self._note(_Line(process=myself(), closes=True))
                if not any(self._users.values()) and 0 < self._world_size <= self._num_closed:
                    self._log.path.unlink(missing_ok=True)
        except StoreTimeout:
            raise
        except StoreError:
            pass
        finally:
            self._closed = True
            self._log.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.set_timeout(_GOODBYE)
            with contextlib.suppress(DureError):
                self.close()

    def start_afresh(self) -> None:
        """In a forked child: another thread of the parent may have been in the middle of it all."""
        self._mutex = threading.Lock()
        self._log.close()
        self._read_again()

    def _read_again(self) -> None:
        self._log.rewind()
        self._board = Board()
        self._users: Counter[Identity] = Counter()
        self._num_closed = 0

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        """Hold the file's lock, with all that is new in it carried out."""
        with self._log.locked(self._timeout.total_seconds()):
            for line in self._log.read():
                self._carry_out(line)
            yield

    def _carry_out(self, line: _Line) -> None:
        if line.write is not None:
            self._board.handle(_ME, line.write, 0.0)
        elif line.process is not None:
            self._users[line.process] += -1 if line.closes else 1
            self._num_closed += line.closes

    def _note(self, line: _Line) -> None:
        self._log.append(line)
        self._carry_out(line)

    @property
    def _named(self) -> str:
        return f"the store in {self.path}"

    def _answered(self, request: StoreRequest, patience_s: float) -> Reply | None:
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

    def _handle(self, request: StoreRequest) -> Reply:
        if self._closed:
            raise StoreError(f"{self._named} was closed by this process")
        if request.op in WRITES:
            with self._locked():
                reply = self._board.handle(_ME, request, 0.0)[0][1]
                try:
                    self._log.append(_Line(request))
                except StoreError:
                    self._read_again()
                    raise
                return reply
        if self._log.has_news():
            with self._locked():
                pass
        return self._board.handle(_ME, request, 0.0)[0][1]


class _Log:
    """The lines of one file, read on from where this object last stopped.

    The file stays open: so its inode is not used again, and a store whose file was deleted, or
    replaced, reports that instead of talking to itself.

    Threads:
        One at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd, self._offset, self._inode = -1, 0, 0

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def rewind(self) -> None:
        """Begin again with the first line."""
        self._offset = 0

    def clear(self) -> None:
        """Delete all lines but the first."""
        self._offset = len(_MAGIC)
        os.ftruncate(self._fd, self._offset)

    def has_news(self) -> bool:
        """Tell, without the lock, whether the file has changed since it was last read."""
        try:
            info = os.stat(self.path)
        except OSError:
            return True  # `locked` raises the error
        return (info.st_ino, info.st_size) != (self._inode, self._offset)

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Generator[None]:
        """Hold the file's lock, for `read` and `append`.

        Raises:
            StoreTimeout: Another process held the lock for `timeout_s`.
            StoreError: The file cannot be opened, was deleted or replaced, or is no store.
        """
        deadline = time.monotonic() + timeout_s
        while not self._lock(deadline):
            self.close()  # a job before this one has just deleted it
        try:
            head = os.pread(self._fd, len(_MAGIC), 0)
            if not _MAGIC.startswith(head):
                raise self._error("is not a store of this build of Dure", f"begins with {head!r}")
            if head != _MAGIC:  # it is new, or was torn
                os.pwrite(self._fd, _MAGIC, 0)
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # a child just forked may have it open, too

    def read(self) -> list[_Line]:
        """Return the lines that are new since the last call; cut off one that has no end."""
        self._offset = max(self._offset, len(_MAGIC))
        size = os.fstat(self._fd).st_size
        new = os.pread(self._fd, size - self._offset, self._offset)
        complete, end, torn = new.rpartition(b"\n")
        try:
            lines = [_unpack(line) for line in complete.splitlines()]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._error("has a line that cannot be understood", str(error)) from None
        self._offset += len(complete + end)
        if torn:
            os.ftruncate(self._fd, self._offset)
        return lines

    def append(self, line: _Line) -> None:
        """Add a line; everything before has been read.

        Raises:
            StoreError: The disk is full or failing; nothing of this line is kept.
        """
        data = _pack(line) + b"\n"
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self._offset + done)
        except OSError as error:
            os.ftruncate(self._fd, self._offset)
            raise self._error("cannot be written", error.strerror or "") from None
        self._offset += len(data)

    def _error(self, what: str, seen: str = "") -> StoreError:
        return StoreError(
            f"the store's file {self.path} {what}",
            seen=seen,
            fix="Choose for each job a new path in a directory of its user, that every rank can "
            f"write to, and delete it only after the job. {SAME_BUILD}",
        )

    def _open(self) -> int:
        try:
            fd = os.open(self.path, _OPEN | (0 if self._inode else os.O_CREAT), 0o600)
        except OSError as error:
            raise self._error("cannot be opened", error.strerror or "") from None
        file = os.fstat(fd)
        if self._is_safe(file):
            return fd
        os.close(fd)
        raise self._error(
            "is not a regular file that only its owner can write to",
            f"mode {stat.filemode(file.st_mode)}, user {file.st_uid}; a user who writes to it "
            "takes part in the job",
        )

    def _is_safe(self, file: os.stat_result) -> bool:
        """Return whether no other user can write to a file, or has laid it out for us.

        In a directory where every user may make files, such as /tmp, one of another user's is a
        trap. Elsewhere its owner is not looked at: shared file systems show strange ones.
        """
        if not stat.S_ISREG(file.st_mode) or file.st_mode & stat.S_IWOTH:
            return False
        is_public = os.stat(self.path.parent).st_mode & stat.S_IWOTH
        return not is_public or {file.st_uid, os.lstat(self.path).st_uid} <= {os.geteuid(), 0}

    def _lock(self, deadline: float) -> bool:
        """Get the lock; return whether the file is still at its path.

        Raises:
            StoreError: It is not, or lines are missing, and it was used before.
        """
        if self._fd < 0:
            self._fd = self._open()
        pause_s = 0.0005
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StoreTimeout(
                        f"another process holds the lock of the store's file {self.path}",
                        fix="It may be stopped: look for it with `fuser` or `lslocks`.",
                    ) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        file = os.fstat(self._fd)
        is_known = self._inode in (0, file.st_ino) and file.st_size >= self._offset
        if is_known and self._is_at_path(file.st_ino):
            self._inode = file.st_ino
            return True
        if self._inode:
            raise self._error("was deleted, replaced or cut while the job ran")
        return False

    def _is_at_path(self, inode: int) -> bool:
        try:
            return os.stat(self.path).st_ino == inode
        except FileNotFoundError:
            return False


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


def _start_afresh() -> None:
    for store in list(_stores):
        store.start_afresh()


os.register_at_fork(after_in_child=_start_afresh)
