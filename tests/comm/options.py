"""Options of a backend as tests want them: all have a default."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from dure.comm.backends.base import BackendOptions
from dure.store import HashStore, Store
from tests.waiting import PATIENCE_S


def options(
    rank: int = 0,
    size: int = 2,
    store: Store | None = None,
    timeout_s: float = PATIENCE_S,
    **more: Any,
) -> BackendOptions:
    """Return the options of rank `rank` of a group of all ranks; `more` replaces others."""
    given: dict[str, Any] = {
        "store": store or HashStore(),
        "rank": rank,
        "size": size,
        "global_ranks": tuple(range(size)),
        "timeout": timedelta(seconds=timeout_s),
        "name": "test",
    }
    return BackendOptions(**given | more)
