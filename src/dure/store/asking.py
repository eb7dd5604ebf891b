"""A store whose operations are requests: to a `Board`, wherever that is, or to etcd."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from dure.errors import StoreError, StoreTimeout
from dure.store.arguments import duration_of, integer_of, keys_of, pairs_of
from dure.store.base import Store
from dure.store.wire import LONGEST_TIMEOUT_S, WRITES, Op, Reply, StoreRequest, encode

__all__ = ["AskingStore"]


class AskingStore(Store):
    """The operations of `Store` as requests; a subclass has them answered."""

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", (key,), (value,))

    def get(self, key: str) -> bytes:
        return self._ask("get", (key,), timeout=self._timeout).values[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._ask("get", keys_of(keys, "multi_get"), timeout=self._timeout).values)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = pairs_of(keys, values, "multi_set")
        self._ask("set", [key for key, _ in pairs], [value for _, value in pairs])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, timeout=self._timeout if timeout is None else timeout)

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", (key,), amount=amount).number

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", (key,), (value,))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask("compare_set", (key,), (expected, desired)).values[0]

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys).number)

    def missing_keys(self, keys: Sequence[str]) -> tuple[str, ...]:
        return self._ask("wait", keys_of(keys, "missing_keys"), at_once=True).names

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", (key,)).number)

    def delete_keys(self, keys: Sequence[str]) -> int:
        return self._ask("delete", keys_of(keys, "delete_keys")).number

    def num_keys(self) -> int:
        return self._ask("count").number

    def list_keys(self) -> list[str]:
        return list(self._ask("list").names)

    def _ask(
        self,
        op: Op,
        keys: Sequence[str] = (),
        values: Sequence[str | bytes] = (),
        *,
        amount: int = 0,
        timeout: timedelta | None = None,
        at_once: bool = False,
    ) -> Reply:
        """Put one request, whose arguments are checked here; only some may be parked (`timeout`).

        With `at_once` a reply that names missing keys is returned.

        Raises:
            TypeError: An argument is of the wrong type. Nothing was sent.
        """
        name = "delete_key" if op == "delete" else op
        asked, given = keys_of(keys, name), tuple([encode(value, name) for value in values])
        parked_s = 0.0 if timeout is None else duration_of(timeout, name).total_seconds()
        parked_s = min(max(0.0, parked_s), LONGEST_TIMEOUT_S)
        patience_s = self._timeout.total_seconds() if timeout is None else parked_s
        once = secrets.token_bytes(8) if op in WRITES else b""
        start = time.monotonic()
        request = StoreRequest(
            op,
            asked,
            given,
            integer_of(amount, name),
            parked_s,
            once,
        )
        reply = self._answered(request, patience_s)
        if reply is not None and (reply.status == "ok" or (at_once and reply.status == "timeout")):
            return reply
        if reply is not None and reply.status == "error":
            raise StoreError(f"{self._named} refused an operation", op=op, seen=reply.text)
        missing = asked if reply is None else reply.names
        raise StoreTimeout(
            f"{self._named} did not answer"
            if reply is None
            else f"keys did not appear in {self._named}",
            op=op,
            keys=missing,
            elapsed_s=time.monotonic() - start,
            seen="" if reply is None else f"no process has set {', '.join(map(repr, missing))}",
        )

    @property
    @abstractmethod
    def _named(self) -> str:
        """What to call this store in a message."""

    @abstractmethod
    def _answered(self, request: StoreRequest, patience_s: float) -> Reply | None:
        """Return the answer to a request; None if there was none for a bit more than `patience_s`.

        Raises:
            StoreError: It cannot be asked, or makes no sense.
        """
