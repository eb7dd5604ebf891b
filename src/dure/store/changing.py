"""A store that changes one value at a time: what is there, in place of it what comes of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from dure.store.base import Store
from dure.store.values import added, appended, encode, exchanged

__all__ = ["ChangingStore"]

_Answer = TypeVar("_Answer")


class ChangingStore(Store):
    """The operations of `Store` on changes and waits; a subclass carries those out."""

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._await(keys, self._timeout, "get")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self._timeout if timeout is None else timeout, "wait")

    def add(self, key: str, amount: int) -> int:
        def change(current: bytes | None) -> tuple[bytes, int]:
            total = added(key, current, amount)
            return b"%d" % total, total

        return self._change(key, change)

    def append(self, key: str, value: str | bytes) -> None:
        more = encode(value)
        self._change(key, lambda current: (appended(key, current, more), None))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = encode(expected), encode(desired)
        return self._change(key, lambda current: exchanged(current, old, new))

    @abstractmethod
    def _change(
        self, key: str, change: Callable[[bytes | None], tuple[bytes | None, _Answer]]
    ) -> _Answer:
        """Put in place what `change` makes of a key's value (None: nothing); return its answer.

        `change` may be called several times, when others change the key meanwhile.
        """

    @abstractmethod
    def _await(self, keys: Sequence[str], timeout: timedelta, op: str) -> list[bytes]:
        """Return the values of `keys` when all are there.

        Raises:
            StoreTimeout: They are not within `timeout`.
        """
