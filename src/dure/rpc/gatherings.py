"""Values of several workers, gathered by one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from dure.errors import PeerLost
from dure.rpc.functions import Later

__all__ = ["Gatherings"]


@dataclass(slots=True)
class _Gathering:
    names: set[str]
    without_dead: bool
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    futures: dict[str, torch.futures.Future[Any]] = field(
        default_factory=dict[str, torch.futures.Future[Any]]
    )


class Gatherings:
    """Those of which this process is the leader, and how many it took part in.

    Args:
        alive: Returns the names of who is there.
    """

    def __init__(self, alive: Callable[[], set[str]]) -> None:
        self._alive, self._lock = alive, threading.Lock()
        self._open: dict[str, _Gathering] = {}
        self._counts: dict[str, int] = {}

    def key(self, names: Collection[str]) -> str:
        """Return a key for the next gathering of these, equal on all of them."""
        joined = ",".join(sorted(names))
        with self._lock:
            self._counts[joined] = number = self._counts.get(joined, 0) + 1
        return f"{number}/{joined}"

    def enter(self, key: str, name: str, value: Any, names: set[str], without_dead: bool) -> Later:
        """Take a value; all are the answer, when they are there."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        with self._lock:
            gathering = self._open.setdefault(key, _Gathering(names, without_dead))
            gathering.values[name], gathering.futures[name] = value, future
        for dead in names - self._alive():  # those that come with a call from before it
            self.died(dead, PeerLost(f"worker {dead!r} is gone", op="gathering"))
        self._look(key)
        return Later(future, counted=False)

    def died(self, name: str, error: PeerLost) -> None:
        """Go on without who died, or end what cannot be whole any more."""
        with self._lock:
            concerned = {key: g for key, g in self._open.items() if name in g.names}
            for key, gathering in concerned.items():
                if gathering.without_dead:
                    gathering.names.discard(name)
                else:
                    del self._open[key]
        for key, gathering in concerned.items():
            if gathering.without_dead:
                self._look(key)
            else:
                for future in gathering.futures.values():
                    future.set_exception(error)

    def _look(self, key: str) -> None:
        """Answer if all are there, the leader last: it may end then."""
        with self._lock:
            gathering = self._open.get(key)
            if gathering is None or not gathering.names <= gathering.values.keys():
                return
            del self._open[key]
        for name in sorted(gathering.futures, reverse=True):
            gathering.futures[name].set_result(gathering.values)
