"""The lock on a checkpoint folder in a store that has no locks: an object that its holder renews.

`.lock` has the holder's record, a token of this holding, and a count. The holder writes it again,
with the next count, every `RENEW_S` seconds. The next job takes it over

- at once, if the record names a process of this host that has ended, or one of the same job whose
  save has ended;
- when the count has not changed for `LEASE_S` seconds, if it is of another host.

A store that can create an object only if there is none (S3, Google Cloud Storage, memory) decides
between two that take it at once. The object is removed before, so a third one may remove what the
second has just created. Its holder finds that before it puts its manifest in place (`lasts`), and
that save fails; files of slices have names that no other save uses.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from weakref import WeakSet

import msgspec

from dure.checkpoint.fsspec_path import FsspecPath
from dure.checkpoint.lock_records import LockRecord, is_alive, is_of_this_job, new_record
from dure.comm.background import finish_at_exit
from dure.store.lifetime import at_process_end
from dure.trace import logs

__all__ = ["LEASE_S", "NAME", "RENEW_S", "Lease", "end_early"]

_log = logs.logger("checkpoint")

NAME = ".lock"
RENEW_S, LEASE_S = 10.0, 60.0
_POLL_S = 0.5
_MOST_ATTEMPTS = 10
"""Attempts to write the object, if it is absent after each: other jobs may have removed it."""
_MAX_BYTES = 1 << 16
_pause, _clock = time.sleep, time.monotonic


class _Content(msgspec.Struct, frozen=True):
    """What the object has."""

    holder: LockRecord
    token: str
    saves: bool
    """Whether a save is using it, or it is held between two saves."""
    count: int = 0


@dataclass
class _Holding:
    """One holding of the lock, from its taking to its release."""

    content: _Content
    end: threading.Event


class Lease:
    """The object that this process holds, or tries to hold.

    Args:
        path: Of the object.

    Threads:
        One save at a time uses it (`FolderLock`); a thread renews it.
    """

    def __init__(self, path: FsspecPath) -> None:
        self.path = path
        self._holding: _Holding | None = None
        self._guard = threading.RLock()  # reentrant: the collector may call `release` anywhere
        _leases.add(self)

    @property
    def record(self) -> LockRecord | None:
        """The record of this process; None while it does not hold the lock."""
        return None if self._holding is None else self._holding.content.holder

    def lasts(self) -> bool:
        """Return whether the object is still the one that this process wrote."""
        holding = self._holding
        if holding is None:
            return False
        found = self._found()
        return found is not None and found.token == holding.content.token

    def keep(self) -> None:
        """Hold the lock between two saves, in which another process of the job may take it."""
        with suppress(OSError):  # a store that is away: then the lease may expire
            self._mark(saves=False)

    def use(self) -> bool:
        """Begin another save with the lock; return False if it is lost, or was never held."""
        return self._mark(saves=True)

    def take(self) -> None:
        """Take the lock.

        Raises:
            OSError: Another job holds it (EBUSY), or the store cannot be written.
        """
        begun = seen_at = _clock()
        last: _Content | None = None
        attempts = 0
        while True:
            content = _Content(new_record(0), secrets.token_hex(16), saves=True)
            try:
                self.path.write(msgspec.json.encode(content), new=True)
                if (found := self._found()) is not None and found.token == content.token:
                    self._begin(content)
                    return
            except FileExistsError:
                if attempts == _MOST_ATTEMPTS:  # such as: a file is in the place of the folder
                    raise
            found = self._found()
            if found is None and not self.path.exists():
                if attempts == _MOST_ATTEMPTS:
                    raise OSError(errno.EIO, "was written, and is absent", str(self.path))
                attempts += 1
                _pause(attempts * _POLL_S / _MOST_ATTEMPTS)
                continue
            ours = found is not None and is_of_this_job(found.holder)
            renewed = last is not None and found != last
            if self._may_be_taken(found, ours, _clock() - seen_at):
                self.path.unlink(missing_ok=True)
            elif not self._may_end(found, ours, renewed) or _clock() - begun > 2 * LEASE_S:
                raise self._refusal(found, ours)
            else:
                if last is None and found is not None and not ours:
                    _log.warning(
                        "%s has saved in %s and may still run: waiting for a sign of it, up to "
                        "%.0f s",
                        *(found.holder.process, self.path.parent, LEASE_S),
                    )
                if renewed:
                    seen_at = _clock()
                last = found
                _pause(_POLL_S)

    def _begin(self, content: _Content) -> None:
        end_early()
        self._holding = holding = _Holding(content, threading.Event())
        threading.Thread(
            target=self._renew, args=(holding,), name="dure-checkpoint-lease", daemon=True
        ).start()

    def _may_be_taken(self, found: _Content | None, ours: bool, unchanged_s: float) -> bool:
        """Return whether the holder has ended, or is of this job and does not save."""
        if unchanged_s > LEASE_S:
            return True
        if found is None:  # of another form: of a later release, or of another program
            return False
        return is_alive(found.holder.process) is False or (ours and not found.saves)

    def _may_end(self, found: _Content | None, ours: bool, renewed: bool) -> bool:
        """Return whether to wait: the holder's save may end soon, or the holder may be dead."""
        if ours or found is None:
            return True
        return is_alive(found.holder.process) is None and not renewed

    def _refusal(self, found: _Content | None, ours: bool) -> OSError:
        who = "" if found is None else f": {found.holder.process}"
        what = "another job is saving there"
        if ours:
            what = f"another process of this job has been saving there for {2 * LEASE_S:.0f} s"
        return OSError(errno.EBUSY, f"{what}{who}", str(self.path.parent))

    def _found(self) -> _Content | None:
        """Return what the object has; None: it is absent, or of another form."""
        try:
            return msgspec.json.decode(self.path.read(0, _MAX_BYTES), type=_Content)
        except (FileNotFoundError, ValueError):
            return None

    def _mark(self, saves: bool) -> bool:
        """Write whether a save uses the lock; return False if this process does not hold it."""
        with self._guard:
            holding = self._holding
            if holding is None or not self.lasts():
                return False
            content = msgspec.structs.replace(
                holding.content, saves=saves, count=holding.content.count + 1
            )
            self.path.write(msgspec.json.encode(content))
            holding.content = content
        return True

    def _renew(self, holding: _Holding) -> None:
        """Write the object again until the lock is released or lost."""
        while not holding.end.wait(RENEW_S):
            with self._guard, suppress(OSError):  # a store that is away for a while
                if self._holding is not holding:
                    return
                if not self._mark(holding.content.saves):
                    _log.warning("%s: another job has taken the folder over", self.path.parent)
                    return

    def release(self) -> None:
        """Remove the object if it is still ours."""
        with self._guard:
            holding = self._holding
            if holding is None:
                return
            holding.end.set()
            with suppress(Exception):  # the store is away, or the process ends
                if self.lasts():
                    self.path.unlink(missing_ok=True)
            self._holding = None

    def forget(self) -> None:
        """In a forked child: leave the lock to the parent."""
        self._guard, self._holding = threading.RLock(), None


_leases: WeakSet[Lease] = WeakSet()


@cache
def end_early() -> None:
    """Release before the pools of threads end that clients of stores use; once for a process.

    That is when the main thread ends, before what `at_process_end` runs. A client that can no
    longer send requests would retry them for seconds. Saves in the background need it, too: so it
    must be called before the main thread ends.
    """
    import_module("concurrent.futures.thread")  # registers the end of pools; the last one is first
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_end)


def _end() -> None:
    finish_at_exit()
    _release_all()


def _release_all() -> None:
    for lease in list(_leases):
        lease.release()


def _forget_all() -> None:
    for lease in list(_leases):
        lease.forget()


os.register_at_fork(after_in_child=_forget_all)
at_process_end(_release_all, order=2)  # after the saves in the background
