"""Several operations as one: started together, waited for together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from dure.comm.work import Work, combine
from dure.comm.world import resolve
from dure.errors import UsageError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup


class Coalesced:
    """What `coalescing_manager` yields: the operations started in it."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def wait(self) -> None:
        """Wait for all of them; the first error is raised."""
        combine(self.works, [], False)


@contextmanager
def coalescing_manager(
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    async_ops: bool = False,
) -> Iterator[Coalesced]:
    """Start the operations called in the block without waiting, and wait for all at its end.

    Args:
        group: Whose operations; those of other groups are not touched.
        device: Accepted for torch's sake; not needed.
        async_ops: Whether to leave the waiting to the caller (`.wait()` of what is yielded).

    Raises:
        UsageError: Managers of one group were nested.
        CommError: One of the operations failed.

    Collective:
        As the operations within: all ranks, in the same order.
    """
    pg = resolve(group, "coalescing_manager")
    if pg.coalesced is not None:
        raise UsageError("coalescing managers of one group cannot be nested", group=pg.group_name)
    manager = Coalesced()
    pg.coalesced = manager.works
    try:
        yield manager
    finally:
        pg.coalesced = None
    if not async_ops:
        manager.wait()
