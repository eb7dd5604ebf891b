"""The file store: for ranks that share a file system and nothing else.

Every process holds a copy of the keys, brought up to date from the file's log (see `log`) before
each operation. A writer does so under the file's lock and then appends what changed, so operations
are atomic. A waiter looks again after 1 ms, then ever more rarely, at most 20 ms apart.

The log also records which processes opened and closed the store. The last one to close removes the
file, and a process that opens the file of a job that died can see whose it was (`users`).
"""

from __future__ import annotations

import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec

from dure.errors import DureError, StoreError, StoreTimeout
from dure.store.base import DEFAULT_TIMEOUT
from dure.store.changing import ChangingStore
from dure.store.identity import Identity, alive, myself
from dure.store.lifetime import at_process_end
from dure.store.log import Log, Record
from dure.store.values import encode

__all__ = ["FileStore", "FileUser", "remove_if_ended"]

_Answer = TypeVar("_Answer")

_GOODBYE = timedelta(seconds=1)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class FileUser:
    """A process that opened the file, and whether it has closed it since."""

    process: Identity
    closed: bool
    mine: bool


class FileStore(ChangingStore):
    """A store in a file that all ranks can open, on one host or on a shared file system with locks.

    Args:
        file_name: The file; it is made if it is not there. Its directory must exist.
        world_size: How many stores will open the file: the last of them to close deletes it.
            -1: nobody does.
        timeout: How long `get`, `wait` and getting the lock wait.

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
    ) -> None:
        super().__init__(timeout)
        self._world_size = world_size
        self._log = Log(Path(file_name).absolute())
        self._name = uuid.uuid4().hex
        self._pid = os.getpid()
        self._closed = False
        self._opened_here = False
        self.start_afresh()
        with self._writing() as write:
            write([Record("open", self._name, msgspec.msgpack.encode(myself()))])
        self._opened_here = True
        _stores.add(self)

    @property
    def path(self) -> str:
        """The file's path."""
        return str(self._log.path)

    @property
    def users(self) -> list[FileUser]:
        """Everybody who opened the file since it was made, this store included."""
        with self._reading():
            return [
                FileUser(process=who, closed=name in self._gone, mine=name == self._name)
                for name, who in self._opened.items()
            ]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        records = [Record("set", key, encode(value)) for key, value in pairs]
        with self._writing() as write:
            write(records)

    def check(self, keys: Sequence[str]) -> bool:
        with self._reading():
            return all(key in self._data for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._writing() as write:
            if key not in self._data:
                return False
            write([Record("delete", key)])
            return True

    def num_keys(self) -> int:
        with self._reading():
            return len(self._data)

    def list_keys(self) -> list[str]:
        with self._reading():
            return sorted(self._data)

    def close(self) -> None:
        """Say that this process is done; the last of `world_size` deletes the file.

        A file that somebody has deleted already is no error here.
        """
        self._close(keep=False)

    def __del__(self) -> None:
        if getattr(self, "_opened_here", False):
            _close_forgotten(self)

    def close_and_keep(self) -> None:
        """Close, and leave the file to whoever has to look into it."""
        self._close(keep=True)

    def _close(self, keep: bool) -> None:
        if self._closed or self._pid != os.getpid():
            return
        try:
            with self._mutex, self._log.locked(self._timeout.total_seconds()) as fd:
                self._apply(self._log.read(fd))
                self._gone.add(self._name)
                all_closed = len(self._gone) == len(self._opened)
                if all_closed and 0 < self._world_size <= len(self._gone) and not keep:
                    self._log.remove()
                else:
                    self._log.write(fd, [Record("close", self._name)])
        except StoreTimeout:
            raise
        except StoreError:
            pass
        finally:
            self._closed = True

    def start_afresh(self) -> None:
        """Forget what was read, to read it again; for a forked child."""
        self._mutex = threading.Lock()
        self._log.rewind()
        self._data: dict[str, bytes] = {}
        self._opened: dict[str, Identity] = {}
        self._gone: set[str] = set()

    @contextmanager
    def _writing(self) -> Generator[Callable[[list[Record]], None]]:
        """Hold the locks with the copy up to date; yields what appends and applies records."""
        with self._mutex:
            self._check_open()
            with self._log.locked(self._timeout.total_seconds()) as fd:
                self._apply(self._log.read(fd))

                def write(records: list[Record]) -> None:
                    self._log.write(fd, records)
                    self._apply(records)

                yield write

    @contextmanager
    def _reading(self) -> Generator[None]:
        """Hold this process's lock with the copy up to date."""
        with self._mutex:
            self._check_open()
            if self._log.has_news():
                with self._log.locked(self._timeout.total_seconds()) as fd:
                    self._apply(self._log.read(fd))
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store in {self.path} was closed by this process")

    def _apply(self, records: list[Record]) -> None:
        for record in records:
            match record.kind:
                case "set":
                    self._data[record.key] = record.value
                case "delete":
                    self._data.pop(record.key, None)
                case "open":
                    self._opened[record.key] = _user_of(record, self.path)
                case "close":
                    self._gone.add(record.key)

    def _change(
        self, key: str, change: Callable[[bytes | None], tuple[bytes | None, _Answer]]
    ) -> _Answer:
        with self._writing() as write:
            stored, answer = change(self._data.get(key))
            if stored is not None:
                write([Record("set", key, stored)])
            return answer

    def _await(self, keys: Sequence[str], timeout: timedelta, op: str) -> list[bytes]:
        start, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            with self._reading():
                missing = tuple(key for key in keys if key not in self._data)
                if not missing:
                    return [self._data[key] for key in keys]
            elapsed_s = time.monotonic() - start
            left_s = timeout.total_seconds() - elapsed_s
            if left_s <= 0:
                raise StoreTimeout(
                    f"keys did not appear in the store in {self.path}",
                    op=op,
                    keys=missing,
                    elapsed_s=elapsed_s,
                    seen=f"nobody has set {', '.join(map(repr, missing))}",
                )
            time.sleep(min(pause_s, left_s))
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def remove_if_ended(path: str | os.PathLike[str], timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """Delete the file of a job that has ended in order, although not all of it ever came.

    That is: everybody who opened the file has closed it again, and lives no more.
    """
    log = Log(Path(path).absolute())
    if not log.path.exists():
        return
    with log.locked(timeout.total_seconds()) as fd:
        records = log.read(fd)
        closed = {record.key for record in records if record.kind == "close"}
        users = [record for record in records if record.kind == "open"]
        lives = [alive(_user_of(user, path)) is not False for user in users]
        if users and not any(lives) and all(user.key in closed for user in users):
            log.remove()


_IDENTITY = msgspec.msgpack.Decoder(Identity)


def _user_of(record: Record, path: str | os.PathLike[str]) -> Identity:
    """Read who opened the store."""
    try:
        return _IDENTITY.decode(record.value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(
            f"the store's file {path} says of one who opened it what cannot be understood",
            seen=str(error),
            fix="Use one version of Dure on all hosts, and a new path for each job.",
        ) from None


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


def _close_forgotten(store: FileStore) -> None:
    """Close a store that nobody closed: whoever forgot that is not one that died."""
    store.set_timeout(_GOODBYE)
    with suppress(DureError):
        store.close()


def _close_stores() -> None:
    for store in list(_stores):
        _close_forgotten(store)


def _start_afresh() -> None:
    """In a forked child: another thread of the parent may have been in the middle of something."""
    for store in list(_stores):
        store.start_afresh()


os.register_at_fork(after_in_child=_start_afresh)
at_process_end(_close_stores, order=2)
