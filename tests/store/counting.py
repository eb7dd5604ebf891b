"""A store of this process that counts what one rank would send to a server, and receive."""

from __future__ import annotations

from collections import Counter

from dure.store import HashStore
from dure.store.wire import Reply, StoreRequest, pack

from .conftest import TIMEOUT


class CountingStore(HashStore):
    """One rank's handle; all ranks share the keys of `shared`."""

    def __init__(self, shared: HashStore) -> None:
        super().__init__(TIMEOUT)
        self._shared = shared
        self.num_requests = self.num_bytes = 0
        self.num_gets: Counter[str] = Counter()
        """How often the value of each key was read."""

    def _answered(self, request: StoreRequest, patience_s: float) -> Reply | None:
        reply = self._shared._answered(request, patience_s)
        self.num_requests += 1
        if request.op == "get":
            self.num_gets.update(request.keys)
        self.num_bytes += len(pack(request)) + len(pack(reply))
        return reply
