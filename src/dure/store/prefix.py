"""A store seen through a prefix: one part of a program cannot meet another's keys."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from dure.store.arguments import keys_of, text_of
from dure.store.base import Store

__all__ = ["PrefixStore"]


class PrefixStore(Store):
    """The keys of `store` that begin with `prefix/`, under their names without it.

    Args:
        prefix: What to put before every key.
        store: Where the keys really lie. It stays the caller's: `close` does not close it.

    `num_keys` and `list_keys` see the keys below the prefix only. The timeout is that of `store`.

    Example:
        ```python
        store = dist.HashStore()
        dist.PrefixStore("epoch1", store).set("loss", "0.5")
        assert store.get("epoch1/loss") == b"0.5"
        ```
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(store, Store):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"PrefixStore(prefix, store): store must be a Store, got {store!r}.")
        super().__init__(store.timeout)
        self._prefix = text_of(prefix, "PrefixStore", "prefix") + "/"
        self._store = store

    @property
    def underlying_store(self) -> Store:
        """The store that holds the keys."""
        return self._store

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait: as long as the underlying store's do."""
        return self._store.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._one(key, "set"), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._one(key, "get"))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(self._full(keys, "wait"), timeout)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._one(key, "add"), amount)

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(self._one(key, "append"), value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._store.compare_set(self._one(key, "compare_set"), expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(self._full(keys, "check"))

    def missing_keys(self, keys: Sequence[str]) -> tuple[str, ...]:
        missing = self._store.missing_keys(self._full(keys, "missing_keys"))
        return tuple(key[len(self._prefix) :] for key in missing)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._one(key, "delete_key"))

    def delete_keys(self, keys: Sequence[str]) -> int:
        return self._store.delete_keys(self._full(keys, "delete_keys"))

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        start = len(self._prefix)
        return [key[start:] for key in self._store.list_keys() if key.startswith(self._prefix)]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(self._full(keys, "multi_get"))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._store.multi_set(self._full(keys, "multi_set"), values)

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix[:-1], self._store.clone())

    def _one(self, key: str, op: str) -> str:
        """Return a key's name in the underlying store."""
        return self._prefix + text_of(key, op)

    def _full(self, keys: Sequence[str], op: str = "wait") -> list[str]:
        """Return the names of several keys in the underlying store."""
        return [self._prefix + key for key in keys_of(keys, op)]
