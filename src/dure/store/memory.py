"""The in-process store: a dictionary and a condition variable, for ranks that are threads."""

# ruff: noqa: D102 (what a method of a store does is said once, in `Store`)

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from dure.errors import StoreTimeout
from dure.store.base import DEFAULT_TIMEOUT, Store
from dure.store.values import added, appended, encode, exchanged

__all__ = ["HashStore"]


class HashStore(Store):
    """A store for the threads of one process.

    Args:
        timeout: How long `get` and `wait` wait.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._data: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str | bytes) -> None:
        data = encode(value)
        with self._changed:
            self._put(key, data)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._changed:
            self._wait(keys, self._timeout, "get")
            return [self._data[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = [(key, encode(value)) for key, value in zip(keys, values, strict=True)]
        with self._changed:
            for key, data in pairs:
                self._put(key, data)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with self._changed:
            self._wait(keys, self._timeout if timeout is None else timeout, "wait")

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = added(key, self._data.get(key), amount)
            self._put(key, b"%d" % total)
            return total

    def append(self, key: str, value: str | bytes) -> None:
        data = encode(value)
        with self._changed:
            self._put(key, appended(key, self._data.get(key), data))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = encode(expected), encode(desired)
        with self._changed:
            stored, answer = exchanged(self._data.get(key), old, new)
            if stored is not None:
                self._put(key, stored)
            return answer

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._data for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self._data.pop(key, None) is not None

    def num_keys(self) -> int:
        with self._changed:
            return len(self._data)

    def list_keys(self) -> list[str]:
        with self._changed:
            return sorted(self._data)

    def _put(self, key: str, data: bytes) -> None:
        """Store and wake the waiters; the caller holds the lock."""
        self._data[key] = data
        self._changed.notify_all()

    def _wait(self, keys: Sequence[str], timeout: timedelta, op: str) -> None:
        """Wait for `keys`; the caller holds the lock, which is released meanwhile."""
        start = time.monotonic()
        ready = self._changed.wait_for(
            lambda: all(key in self._data for key in keys), timeout.total_seconds()
        )
        if not ready:
            missing = tuple(key for key in keys if key not in self._data)
            raise StoreTimeout(
                "keys did not appear in the in-process store",
                op=op,
                keys=missing,
                elapsed_s=time.monotonic() - start,
                seen=f"nobody has set {', '.join(map(repr, missing))}",
            )
