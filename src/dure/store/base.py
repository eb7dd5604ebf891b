"""The key-value store, with which ranks find each other; it is not made for speed."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Self

from dure.errors import QueueEmptyError, StoreTimeout
from dure.store.arguments import duration_of, integer_of, keys_of, pairs_of, text_of

__all__ = ["DEFAULT_TIMEOUT", "Store"]

DEFAULT_TIMEOUT = timedelta(seconds=300)

_LOOK_S = 0.2
"""How often a caller that waits for a value of a queue looks which one is next."""


class Store(ABC):
    """Keys (str) to values (bytes), shared by the ranks of a job.

    Names and meaning are those of torch.distributed's stores. Values given as str are stored as
    UTF-8; a key given as bytes is the same key as its text in UTF-8. A wait that takes longer than
    `timeout` raises `StoreTimeout`, which names the keys. An argument of another type raises
    `TypeError` before anything is sent: a value that is neither str nor bytes, one string in the
    place of a list of keys, an amount that is not an integer.

    Threads:
        Every method may be called from any thread. Lifetime: keys live as long as the store's host
        (a process, a file, a server) does.

    Obtained from:
        Its subclasses, such as `TCPStore` and `FileStore`; `ProcessGroup.get_group_store`.

    Example:
        ```python
        store = dist.FileStore("shared.keys")  # any other store has the same methods
        if dist.get_rank() == 0:
            store.set("learning_rate", "0.1")
        assert store.get("learning_rate") == b"0.1"  # waits for the key
        ```
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._timeout = duration_of(timeout, type(self).__name__)

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long `get` and `wait` wait."""
        self._timeout = duration_of(timeout, "set_timeout")

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Store `value` under `key`, in place of what was there."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return the value of `key`; wait for it to appear."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all `keys` exist."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to the number (decimal text) under `key`, 0 if there is none; return the sum."""

    @abstractmethod
    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of `key`, which may not exist yet."""

    @abstractmethod
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `desired` if the value is `expected`, or if there is none and `expected` is empty.

        Returns:
            The value under `key` afterwards; `expected` if there is still none.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Tell at once whether all `keys` exist."""

    def missing_keys(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Return at once which of `keys` do not exist, in their order.

        Cost:
            One request, in a custom store a few `check` per missing key.
        """
        names = keys_of(keys, "missing_keys")
        if self.check(names):
            return ()
        if len(names) == 1:
            return names
        half = len(names) // 2
        return *self.missing_keys(names[:half]), *self.missing_keys(names[half:])

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Remove `key`; return whether it existed."""

    def delete_keys(self, keys: Sequence[str]) -> int:
        """Remove `keys`; return how many of them existed.

        Cost:
            One request, in a custom store and in etcd one per key.
        """
        return sum(self.delete_key(key) for key in keys_of(keys, "delete_keys"))

    @abstractmethod
    def num_keys(self) -> int:
        """Return how many keys there are."""

    @abstractmethod
    def list_keys(self) -> list[str]:
        """Return the keys, sorted."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`; wait for all of them."""
        names = keys_of(keys, "multi_get")
        self.wait(names)
        return [self.get(name) for name in names]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store each of `values` under the key at the same place of `keys`."""
        for key, value in pairs_of(keys, values, "multi_set"):
            self.set(key, value)

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Return when `world_size` callers have called with the same `key`.

        A key may be used again: every `world_size` calls form one barrier.

        Args:
            key: The barrier's name.
            world_size: How many callers.
            timeout: How long to wait; the store's where None.

        Raises:
            StoreTimeout: Not all have called.
        """
        key = text_of(key, "barrier")
        world_size = integer_of(world_size, "barrier", "world_size")
        meeting, came = divmod(self.add(f"{key}/barrier/count", 1) - 1, max(1, world_size))
        done = f"{key}/barrier/{meeting}"
        if came == world_size - 1:
            self.set(done, b"")
        self.wait([done], timeout)

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append `value` to the queue `key`; each value is popped once.

        A queue is a few keys that begin with `key` and "/queue/"; the key itself is not one.
        """
        number = self.add(f"{text_of(key, 'queue_push')}/queue/pushed", 1)
        self.set(f"{key}/queue/{number}", value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove the oldest value of the queue `key` and return it.

        Args:
            key: The queue.
            block: Wait until there is one, as long as the store's timeout.

        Raises:
            QueueEmptyError: There is none, and `block` is False.
            StoreTimeout: No value arrived within the store's timeout.

        Cost:
            Five round trips, more if several callers pop at once.
        """
        text_of(key, "queue_pop")
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            before, number = self._popped(key)
            item = f"{key}/queue/{number + 1}"
            if not self.check([item]):
                if self._popped(key)[0] != before:  # another caller has popped the item
                    continue
                if not block:
                    raise QueueEmptyError("the queue is empty", op="queue_pop", seen=repr(key))
                left_s = max(0.0, deadline - time.monotonic())
                try:
                    self.wait([item], timedelta(seconds=min(left_s, _LOOK_S)))
                except StoreTimeout:
                    if left_s > _LOOK_S:
                        continue
                    raise
            # The word is unique: of several callers that claim one number, exactly one reads back
            # its own word.
            mine = f"{number + 1} {secrets.token_hex(8)}"
            if self.compare_set(f"{key}/queue/popped", before, mine) == mine.encode():
                value = self.get(item)
                self.delete_key(item)
                return value

    def queue_len(self, key: str) -> int:
        """Return how many values the queue `key` holds."""
        pushed = f"{text_of(key, 'queue_len')}/queue/pushed"
        if not self.check([pushed]):
            return 0
        return int(self.get(pushed)) - self._popped(key)[1]

    def _popped(self, key: str) -> tuple[str, int]:
        """Return the word under which the last value was popped, and how many have been."""
        name = f"{key}/queue/popped"
        word = self.get(name).decode() if self.check([name]) else ""
        return word, int(word.partition(" ")[0] or 0)

    def clone(self) -> Self:
        """Return a store of the same keys, with a timeout of its own.

        One store serves any number of threads, so threads need no clones.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define clone")

    def has_extended_api(self) -> bool:
        """Tell that append, multi_get and multi_set exist (torch asks)."""
        return True

    def close(self) -> None:  # noqa: B027 (nothing to release is a fine answer)
        """Release what the store holds in this process; safe to call twice."""
