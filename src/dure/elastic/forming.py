"""The store in which an epoch's group is made, where no wait outlasts the epoch.

To make a group, ranks leave each other addresses in a store and wait for those of the others. If a
member ends before it has left its own, the others would wait for the whole timeout; if one gives
up, it leaves no more. So whoever waits looks every `_WATCH_S` whether all members live, as far as
this host's kernel can tell, and whether one has announced the epoch after this one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from dure.elastic.registry import has_begun
from dure.elastic.roster import Plan
from dure.errors import Aborted, PeerLost, StoreTimeout
from dure.store.base import Store
from dure.store.identity import alive
from dure.store.prefix import PrefixStore

__all__ = ["EpochStore"]

_WATCH_S = 0.02


class EpochStore(PrefixStore):
    """The keys in which an epoch's group is made; waiting in it ends when the epoch has failed.

    Args:
        store: The job's own keys.
        plan: The epoch.
        patience_s: How long to wait for members that live.
    """

    def __init__(self, store: Store, plan: Plan, patience_s: float) -> None:
        super().__init__(f"{plan.number}/group", store)
        self._plan, self._patience = plan, timedelta(seconds=patience_s)

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait: as long as members that live are waited for."""
        return self._patience

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all `keys` exist; raise when a member has ended, or has given up."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit.total_seconds()
        while True:
            left_s = deadline - time.monotonic()
            try:
                return super().wait(keys, timedelta(seconds=max(0.0, min(left_s, _WATCH_S))))
            except StoreTimeout:
                if left_s <= _WATCH_S:
                    raise
            self._look()

    def get(self, key: str) -> bytes:
        """Return the value of `key`; wait for it as `wait` does."""
        self.wait([key])
        return super().get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`; wait for them as `wait` does."""
        self.wait(keys)
        return super().multi_get(keys)

    def _look(self) -> None:
        """Raise if the group will not come about."""
        number, members = self._plan.number, self._plan.members
        for rank, member in enumerate(members):
            if alive(member.process) is False:
                raise PeerLost(
                    f"{member} ended before the group was made",
                    peer=rank,
                    pid=member.process.pid,
                    host=member.process.host,
                    world_size=len(members),
                )
        if has_begun(self.underlying_store, number + 1):
            raise Aborted("another rank gave up making the group", world_size=len(members))
