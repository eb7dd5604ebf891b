"""Values of several workers, gathered by one of them."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

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
    """Those of which this process is the leader, and how many it took part in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Gathering] = {}
        self._counts: dict[str, int] = {}

    def key(self, names: Collection[str]) -> str:
        """Return a key for the next gathering of these, equal on all of them."""
        joined = ",".join(sorted(names))
        with self._lock:
            self._counts[joined] = number = self._counts.get(joined, 0) + 1
        return f"{number}/{joined}"
