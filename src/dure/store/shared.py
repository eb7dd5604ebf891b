"""What several hosts agree through: keys that change together, keys that vanish, and news of both.

A job's state is one key. Who has an event reads the state, applies the event and writes the result
back in a transaction that expects the state it read and its own leased key; if that fails, it looks
again. Nobody leads, and whoever is not renewed is gone for all at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

__all__ = ["EVERYTHING", "Shared"]

EVERYTHING = -1
"""As `since` of `look`: answer at once, whatever has changed."""


@runtime_checkable
class Shared(Protocol):
    """Transactions, leases and watching, on the keys of a store.

    Every change of a key has a revision, a number that only grows. What was asked through a
    connection that broke is asked again through the next one, and done once.

    Threads: every method may be called from any thread.

    Raises:
        StoreLost: Who keeps the keys is gone, or has forgotten them.
        StoreTimeout: No answer came within the store's timeout; it may have been done or not.
    """

    def transact(
        self, expect: Mapping[str, bytes | None], write: Mapping[str, bytes | None]
    ) -> bool:
        """Write all (None: delete) if every expected value is so (None: absent).

        A key that is written has no lease afterwards.

        Returns:
            Whether it was so, and all is written; else nothing is.
        """
        ...

    def hold(self, key: str, value: bytes, ttl_s: float) -> None:
        """Create `key`, or take it over, with a lease.

        It vanishes when it was not renewed for `ttl_s`, counted by who serves, from the receipt.
        """
        ...

    def renew(self, key: str) -> bool:
        """Begin the lease of `key` anew; False: it has vanished, or has no lease."""
        ...

    def release(self, key: str) -> None:
        """Let `key` vanish now; whoever holds it."""
        ...

    def look(self, prefix: str, since: int, timeout_s: float) -> tuple[int, dict[str, bytes]]:
        """Wait until a key below `prefix` has changed after the revision `since`, or the timeout.

        It may also return earlier: `since` may lie too far back to know.

        Returns:
            The revision, which is the `since` of the next look, and all keys that begin with
            `prefix` as they were then.
        """
        ...
