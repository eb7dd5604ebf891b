"""Torch's key-value store as a `Store`."""

# ruff: noqa: D102 (the methods are documented in `Store`)

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistNetworkError

from dure.errors import StoreLost, StoreTimeout
from dure.store.arguments import duration_of, keys_of
from dure.store.base import DEFAULT_TIMEOUT, Store
from dure.torch_private import c10d

__all__ = ["TorchStore"]

_SHORTEST = timedelta(milliseconds=1)
"""Torch's stores of a file and of one process wait without end if the limit is 0."""


@contextmanager
def _lost_if_it_breaks() -> Iterator[None]:
    """Raise `StoreLost` in place of torch's error for a connection that breaks."""
    try:
        yield
    except DistNetworkError as error:
        raise StoreLost("the connection to torch's store broke", seen=str(error)) from error


class TorchStore(Store):
    """A store of torch.distributed (TCP, file, hash, or a prefix of one) as a `Store`.

    The error of a timeout has a different text for each kind of store. So after an error, `wait`
    asks which keys are missing; if that fails too, the connection is lost.

    Args:
        store: Torch's store. `close` does not close it.

    Threads:
        As torch's store; a TCP store serves one call at a time.
    """

    def __init__(self, store: c10d.Store) -> None:
        super().__init__(getattr(store, "timeout", DEFAULT_TIMEOUT))
        self._store = store

    @property
    def underlying_store(self) -> c10d.Store:
        """Torch's store."""
        return self._store

    def set(self, key: str, value: str | bytes) -> None:
        with _lost_if_it_breaks():
            self._store.set(key, value)  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        names = keys_of(keys, "wait")
        limit = self.timeout if timeout is None else duration_of(timeout, "wait")
        limit = max(limit, _SHORTEST)
        began = time.monotonic()
        try:
            self._store.wait(list(names), limit)
        except (RuntimeError, ValueError) as error:  # DistStoreError, DistNetworkError
            raise self._explain(error, names, time.monotonic() - began) from error

    def _explain(
        self, error: Exception, keys: Sequence[str], elapsed_s: float
    ) -> StoreTimeout | StoreLost:
        try:
            missing = self.missing_keys(keys)
        except RuntimeError:
            return StoreLost("the connection to torch's store broke", seen=str(error))
        return StoreTimeout(
            "keys did not appear in time",
            keys=missing,
            elapsed_s=elapsed_s,
            seen=f"waited for {', '.join(missing) or 'keys that have appeared since'}",
            fix="Check that all ranks reach this call.",
        )

    def add(self, key: str, amount: int) -> int:
        with _lost_if_it_breaks():
            return self._store.add(key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        with _lost_if_it_breaks():
            self._store.append(key, value)  # pyright: ignore[reportAttributeAccessIssue]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        with _lost_if_it_breaks():
            return self._store.compare_set(key, expected, desired)  # pyright: ignore[reportArgumentType]

    def check(self, keys: Sequence[str]) -> bool:
        with _lost_if_it_breaks():
            return self._store.check(list(keys_of(keys, "check")))

    def missing_keys(self, keys: Sequence[str]) -> tuple[str, ...]:
        names = keys_of(keys, "missing_keys")
        if self._store.check(list(names)):
            return ()
        try:
            here = set(self._store.list_keys())
        except RuntimeError:  # a custom store of torch's that cannot
            return super().missing_keys(names)
        return tuple(name for name in names if name not in here)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = list(keys_of(keys, "multi_get"))
        self.wait(names)
        with _lost_if_it_breaks():
            return self._store.multi_get(names)

    def delete_key(self, key: str) -> bool:
        with _lost_if_it_breaks():
            return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        return sorted(self._store.list_keys())
