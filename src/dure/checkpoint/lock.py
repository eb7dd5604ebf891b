"""The lock on a checkpoint folder: its holder, and when it is released.

    .lock         the holder: process number, start time, host, and the job's tokens
    .lock-turn    while a process of the holder's job takes the lock over
    .lock-<hex>   a file that becomes `.lock`, or that shows the time of the file system

The file exists while a process holds the lock. A record whose process has ended has no effect: the
next job takes the lock over. Three things show whether the process still runs:

1. A lock of the kernel (flock). The holder keeps the file open and locked, and the kernel unlocks
   it when the process ends, for whatever reason. On a file system of one host this decides, also
   between containers, whose processes do not see each other.
2. The process number with the start time, if the record is of this host.
3. A lease. A file system that several hosts mount may support such locks within one host only, or
   not at all. There the holder renews the file's time every `RENEW_S` seconds, and the record of
   another host expires when it was not renewed for `LEASE_S` seconds. Both times are those of the
   file system, so clocks of hosts may differ.

A lock is taken over by putting another file in the place of the file. A holder that was considered
dead (it was suspended for longer than the lease) finds that its file is gone, and saves no more.

Processes of one job do not exclude each other between their saves (`lock_records` says which
processes are of one job).

The kernel's lock is exclusive during a save and shared between two saves. A process of the same job
that gets a shared lock, too, takes the folder over: it makes a locked file and renames it to
`.lock`, so that no other job finds the folder without a lock. If another process is rank 0 in a
later save, the previous one releases the lock.

A copy of a folder also has a copy of the file. The record contains the inode number of its file, so
a copy does not hold because its process runs, but only until its lease expires.

A store that fsspec reaches has no locks: see `lease`.

Threads:
    Within a process one save at a time holds the lock; the next waits for it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary, finalize

import msgspec

from dure.checkpoint.file_systems import file_system_of
from dure.checkpoint.fsspec_path import AnyPath, FsspecPath
from dure.checkpoint.lease import LEASE_S, NAME, RENEW_S, Lease, end_early
from dure.checkpoint.lock_records import LockRecord, is_alive, is_of_this_job, new_record, note_job
from dure.store.lifetime import at_process_end
from dure.trace import logs

__all__ = [
    "LEASE_S",
    "RENEW_S",
    "FolderLock",
    "give_up",
    "lock_of",
    "note_job",
    "prepare_end",
    "sees_lock",
]

_log = logs.logger("checkpoint")

_TURN = f"{NAME}-turn"
_ENDING_S = 1.0  # a process that ends has closed its files after this time, or others have copies
_POLL_S = 0.05
_MAX_BYTES = 1 << 16

_ONE_HOST = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # XFS
        0x9123683E,  # Btrfs
        0x01021994,  # tmpfs
        0x858458F6,  # ramfs
        0x794C7630,  # overlay
        0xF2F52010,  # F2FS
        0x2FC12FC1,  # ZFS
        0xCA451A4E,  # bcachefs
    }
)
"""File systems whose locks hold for all that see them, since one kernel mounts them."""


class _Held:
    """The file of a lock that this process holds; an object that outlives its `FolderLock`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor: int | None = None
        self.record: LockRecord | None = None
        self._end = threading.Event()
        self._open = threading.RLock()  # reentrant: the collector may call `release` anywhere
        """Held while the descriptor is used, or set to None before it is closed."""

    def begin(self, descriptor: int, record: LockRecord, renew: bool) -> None:
        """Hold the lock from now on."""
        self.descriptor, self.record, self._end = descriptor, record, threading.Event()
        _held.add(self)
        if renew:
            threading.Thread(
                target=self._renew, args=(self._end,), name="dure-checkpoint-lock", daemon=True
            ).start()

    def _renew(self, end: threading.Event) -> None:
        """Renew the time of the file until the lock is released."""
        while not end.wait(RENEW_S):
            with self._open, suppress(OSError):  # a server that is away for a while
                if not end.is_set() and self.descriptor is not None:
                    os.utime(self.descriptor)

    def lasts(self) -> bool:
        """Return whether the file is still the one that this process made."""
        return self.descriptor is not None and _is_at(self.path, self.descriptor)

    def keep(self) -> None:
        """Hold the lock between two saves, in which another process of the job may take it."""
        if self.descriptor is not None:
            _flock(self.descriptor, fcntl.LOCK_SH)

    def use(self) -> bool:
        """Begin another save with the lock; return False if it is lost, or was never held."""
        end = _clock() + LEASE_S
        while self.descriptor is not None and self.lasts() and _clock() < end:
            if _flock(self.descriptor) is not False:
                return self.lasts()
            _flock(self.descriptor, fcntl.LOCK_SH)  # the attempt has given up that lock, too
            _pause(_POLL_S)  # another process of the job takes it at this moment
        return False

    def take(self) -> None:
        """Take the lock; OSError if another job holds it, or the file cannot be made."""
        _Taking(self.path, self).take()

    def release(self) -> None:
        """Remove the file if it is still ours, and unlock it."""
        with self._open:
            descriptor, self.descriptor = self.descriptor, None
        if descriptor is None:
            return
        self._end.set()
        _held.discard(self)
        if _is_at(self.path, descriptor):
            with suppress(OSError):
                os.ftruncate(descriptor, 0)  # if it cannot be removed, it names no holder
            with suppress(OSError):
                self.path.unlink()
        with suppress(OSError):  # a file system without locks
            # Closing alone would leave the lock to the copies that forked children have.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        with suppress(OSError):  # a network file system; the descriptor is closed anyway
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked child: close the file, and leave the lock to the parent."""
        self._open = threading.RLock()  # the parent's thread may have held it
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class FolderLock:
    """The lock of this process on one folder.

    Args:
        folder: The folder, which exists.
    """

    def __init__(self, folder: AnyPath) -> None:
        self.path = path = folder / NAME
        self.kept = False
        """Whether the lock is held after the save, until this object is freed."""
        self._guard = threading.Lock()
        self._free = threading.Condition(self._guard)
        self._owner: int | None = None
        self._held = Lease(path) if isinstance(path, FsspecPath) else _Held(path)
        finalize(self, self._held.release).atexit = False

    def acquire(self) -> None:
        """Keep other jobs, and other threads of this process, from saving there until `release`.

        Raises:
            OSError: Another job saves there (EBUSY), or the file cannot be made.
        """
        if self._owner == threading.get_ident():
            raise OSError(errno.EBUSY, "this thread is saving there already", str(self.path.parent))
        try:
            with self._guard:
                while self._owner is not None:
                    self._free.wait()
                self._owner = threading.get_ident()
            if not self._held.use():
                self._held.release()
                self._held.take()
        except BaseException:
            if self._owner == threading.get_ident():  # not interrupted while it waited
                self.release()
            raise

    def release(self) -> None:
        """End the save, and release the lock unless it is `kept`."""
        if self.kept:
            self._held.keep()
        else:
            self._held.release()
        with self._guard:
            self._owner = None
            self._free.notify_all()  # one that is interrupted would lose the notice

    def give_up(self) -> None:
        """Release the lock, unless a save is using it."""
        with self._guard:
            if self._owner is None:
                self.kept = False
                self._held.release()

    def check(self) -> None:
        """Raise OSError if another job has taken the lock over."""
        if not self._held.lasts():
            seen = f"{NAME} is gone: another job has taken the folder over, or it was removed"
            raise OSError(errno.EBUSY, seen, str(self.path.parent))

    @property
    def job(self) -> str:
        """The token of the job, while the lock is held."""
        assert self._held.record is not None
        return self._held.record.job


class _Taking:
    """One attempt to acquire a lock.

    Args:
        path: The file.
        held: Gets the file and the record.
    """

    def __init__(self, path: Path, held: _Held) -> None:
        self._path, self._held = path, held
        self._shared = not _is_of_one_host(path.parent)
        self._since = _clock()

    def take(self) -> None:
        """Take the lock.

        Raises:
            OSError: Another job holds it, or the file cannot be made.
        """
        while True:
            descriptor, made = _open(self._path)
            try:
                taken = self._try(descriptor, made)
            except BaseException:
                os.close(descriptor)
                raise
            if descriptor != self._held.descriptor:
                os.close(descriptor)
            if taken:
                return

    def _try(self, descriptor: int, made: bool) -> bool:
        """Try to take the lock; False: the file has changed or may change, so try again."""
        locked = _flock(descriptor)
        found = _read(descriptor)
        if not _is_at(self._path, descriptor):  # the holder has just removed it
            if self._waited() > 2 * LEASE_S:
                raise self._refusal(found)
            _pause(_POLL_S)
            return False
        if locked is False:
            return self._wait_for_end(descriptor, found)
        if not made:
            if not self._has_ended(descriptor, found, bool(locked)):
                if not locked or self._shared or self._waited() > _ENDING_S:
                    raise self._refusal(found)
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # the holder may want it
                _pause(_POLL_S)
            elif _is_at(self._path, descriptor):
                self._path.unlink(missing_ok=True)
            return False
        self._begin(descriptor)
        return True

    def _begin(self, descriptor: int, at: Path | None = None) -> None:
        """Write the record into a file, rename the file if it is not yet `.lock`, and hold it."""
        record = new_record(os.fstat(descriptor).st_ino)
        with suppress(OSError):  # a full disk: the save that follows may make room
            os.pwrite(descriptor, msgspec.json.encode(record), 0)
        if at is not None:
            at.replace(self._path)
        self._held.begin(descriptor, record, self._shared)

    def _waited(self) -> float:
        return _clock() - self._since

    def _wait_for_end(self, descriptor: int, found: LockRecord | None) -> bool:
        """Handle a lock that the kernel reports as held.

        A process of the same job waits for the end of the holder's save. A holder that is ending
        gets a moment. After that, a record of a dead process is void: the file is still locked
        because a process that it had forked has a copy of the descriptor.

        Returns:
            Whether the lock was taken over; if not, try again.

        Raises:
            OSError: Another process holds it, and is not expected to release it soon.
        """
        ours = found is not None and is_of_this_job(found)
        lives = None if found is None else is_alive(found.process)
        if ours and self._take_over(descriptor):
            return True
        waited = self._waited()
        if ours and lives is not False and waited < LEASE_S:
            _pause(_POLL_S)
        elif found is not None and lives is not False:
            raise self._refusal(found, ours)
        elif waited < _ENDING_S:
            _pause(_POLL_S)
        elif found is None or waited > 2 * LEASE_S:
            raise self._refusal(found)
        else:
            with _turn(self._path) as mine:
                if mine and _is_at(self._path, descriptor):
                    self._path.unlink(missing_ok=True)
            if not mine:
                _pause(_POLL_S)
        return False

    def _take_over(self, descriptor: int) -> bool:
        """Take a lock that this job holds; False: a save is using it, or another takes it now.

        The shared lock shows that no save is using the file. It ends when another file is in its
        place, so no other job finds this one without a lock.
        """
        with _turn(self._path) as mine:
            if not mine or not _flock(descriptor, fcntl.LOCK_SH):
                return False
            if not _is_at(self._path, descriptor):
                return False
            new = self._path.with_name(f"{NAME}-{secrets.token_hex(8)}")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            taken = os.open(new, flags, 0o666)
            try:
                _flock(taken)
                self._begin(taken, new)
            except BaseException:
                if self._held.descriptor != taken:
                    os.close(taken)
                    new.unlink(missing_ok=True)
                raise
        return True

    def _has_ended(self, descriptor: int, found: LockRecord | None, locked: bool) -> bool:
        """Return whether the holder has ended, if the kernel does not report a lock.

        The lock of a holder that lives may be missing for a moment: while it is converted (flock(2)
        releases it before), or while the process ends.
        """
        lives = None if found is None else is_alive(found.process)
        if found is not None and lives and not is_of_this_job(found):
            inode = os.fstat(descriptor).st_ino
            if found.inode == inode or (found.inode == 0 and (self._shared or not locked)):
                return False
        if locked and not self._shared:
            return True
        if found is not None and (lives is False or is_of_this_job(found)):
            return True
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # others may try in the meantime
        return self._lease_is_over(found)

    def _lease_is_over(self, found: LockRecord | None) -> bool:
        """Wait until the holder renews the file, or for the rest of its lease."""
        renewed = _time_of(self._path)
        age_s = _now_in(self._path.parent) - renewed[1]
        if age_s < LEASE_S:
            holder = "an unknown process" if found is None else found.process
            _log.warning(
                "%s has saved in %s and may still run: waiting for a sign of it, up to %.0f s "
                "(if the folder is a copy of another one, remove %s)",
                *(holder, self._path.parent, LEASE_S - max(age_s, 0), self._path),
            )
        end = _clock() + LEASE_S - max(age_s, 0)
        while _clock() < end:
            _pause(min(1.0, RENEW_S))
            if _time_of(self._path) != renewed:
                return False
        return True

    def _refusal(self, found: LockRecord | None, ours: bool = False) -> OSError:
        who = "" if found is None else f": {found.process}"
        what = "another job is saving there"
        if ours:
            what = f"another process of this job has been saving there for {LEASE_S:.0f} s"
        return OSError(errno.EBUSY, f"{what}{who}", str(self._path.parent))


_pause, _clock = time.sleep, time.monotonic


def _open(path: Path) -> tuple[int, bool]:
    """Open the file; return its descriptor, and whether this call has created it."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        with suppress(FileExistsError):
            return os.open(path, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        with suppress(FileNotFoundError):
            try:
                return os.open(path, flags | os.O_RDWR), False  # NFS locks files open for writing
            except PermissionError:  # another user's
                return os.open(path, flags | os.O_RDONLY), False


def _flock(descriptor: int, how: int = fcntl.LOCK_EX) -> bool | None:
    """Lock a file; False: another process has locked it; None: no locks are supported."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def _turn(path: Path) -> Iterator[bool]:
    """Exclude other processes from taking over the lock at a path; False: one is doing so.

    The file is not the folder itself, which others lock (`flock FOLDER python train.py`). A file
    that a killed process has left excludes no process.
    """
    file = path.with_name(_TURN)
    flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(file, flags, 0o666)
    mine = False
    try:
        mine = _flock(descriptor) is not False and _is_at(file, descriptor)
        yield mine
    finally:
        if mine:
            file.unlink(missing_ok=True)
            with suppress(OSError):  # closing alone would leave it to a forked child
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file is the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _read(descriptor: int) -> LockRecord | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, _MAX_BYTES, 0), type=LockRecord)
    except (OSError, ValueError):  # empty, or cut short
        return None


def _time_of(path: Path) -> tuple[int, float]:
    """Return inode and time of a file; opening it makes a network file system read them again."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0, 0.0
    try:
        found = os.fstat(descriptor)
        return found.st_ino, found.st_mtime
    finally:
        os.close(descriptor)


def _now_in(folder: Path) -> float:
    """Return the time that the folder's file system gives to a new file."""
    probe = folder / f"{NAME}-{secrets.token_hex(8)}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


def _is_of_one_host(folder: Path) -> bool:
    """Return whether a folder is on a file system that no other host mounts."""
    if sys.platform != "linux":
        return False
    found = ctypes.create_string_buffer(256)  # struct statfs, which begins with the kind
    if ctypes.CDLL(None).statfs(os.fsencode(folder), found):
        return False
    return ctypes.c_long.from_buffer(found).value in _ONE_HOST


_held: WeakSet[_Held] = WeakSet()
_locks: WeakValueDictionary[str, FolderLock] = WeakValueDictionary()
_guard = threading.Lock()


def lock_of(folder: AnyPath) -> FolderLock:
    """Return this process's lock on a folder."""
    key = file_system_of(folder).key(folder)
    with _guard:
        found = _locks.get(key)
        if found is None:
            found = _locks[key] = FolderLock(folder)
        return found


def prepare_end(folder: AnyPath) -> None:
    """Let saves in the background into a folder end before the process; called before they begin.

    The clients of stores end when the main thread ends.
    """
    if isinstance(folder, FsspecPath):
        end_early()


def give_up(folder: AnyPath) -> None:
    """Leave the lock on a folder to another process of the job, which saves from now on."""
    with _guard:
        found = _locks.get(file_system_of(folder).key(folder))
    if found is not None:
        found.give_up()


def sees_lock(folder: AnyPath, made: AnyPath) -> bool:
    """Return whether a lock is held on a folder, and another one exists.

    With it a rank finds out whether it sees the folder that the holder of the lock sees.

    Args:
        folder: The folder with the lock.
        made: Where the files will be: that folder, or one that the holder has made in it.
    """
    found = (folder / NAME).exists()
    if isinstance(made, FsspecPath):  # it exists when it has files
        return found
    if not found and made.is_dir():  # listing makes a network file system read it again
        found = NAME in os.listdir(folder)
    return found and made.is_dir()


def _release_all() -> None:
    for held in list(_held):
        held.release()


def _forget_all() -> None:
    """In a forked child: the locks belong to the parent, and end with it."""
    global _guard
    _guard = threading.Lock()  # another thread of the parent may have held it
    for held in list(_held):
        held.forget()
    _held.clear()
    _locks.clear()


os.register_at_fork(after_in_child=_forget_all)
at_process_end(_release_all, order=2)  # after the saves in the background
