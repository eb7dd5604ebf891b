"""A barrier that names who did not come, and leaves the group usable when it fails.

It runs over the store, not over the backend, so that it works when the backend is stuck: rank 0
waits for one key of every other rank, then answers with one key for all.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from dure.comm.world import resolve
from dure.errors import CommTimeout, StoreTimeout, UsageError

if TYPE_CHECKING:
    from dure.comm.group.core import GroupCore


def monitored_barrier(
    group: GroupCore | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait for all ranks; rank 0 finds out who did not come, and everyone is told.

    Args:
        group: The group.
        timeout: A timedelta, or seconds; the group's timeout where None.
        wait_all_ranks: Whether rank 0 waits for all, and names every absent rank, or only the
            first that it misses.

    Raises:
        CommTimeout: With the absent ranks in `missing`, on every rank that came.

    Collective:
        All ranks call. A rank that does not is named; the group can be used afterwards.

    Cost:
        n + 1 keys in the store: milliseconds. Not for inner loops.
    """
    group = resolve(group, "monitored_barrier")
    if timeout is None:
        timeout = group.timeout
    limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if limit_s < 0:
        raise UsageError("the timeout is negative", op="monitored_barrier", seen=f"{limit_s} s")
    group.num_monitored += 1
    number = group.num_monitored
    end = time.monotonic() + limit_s
    if group.rank() == 0:
        _lead(group, f"monitored/{number}", end, limit_s, wait_all_ranks)
    else:
        _follow(group, f"monitored/{number}", end, limit_s)


def _error(group: GroupCore, what: str, missing: tuple[int, ...], limit_s: float) -> CommTimeout:
    return CommTimeout(
        what,
        op="monitored_barrier",
        group=group.group_name,
        rank=group.rank(),
        world_size=group.size(),
        elapsed_s=limit_s,
        missing=missing,
        peer=missing[0] if missing else None,
        fix="Look at what those ranks do instead (py-spy, their last lines of output).",
    )


def _lead(group: GroupCore, prefix: str, end: float, limit_s: float, wait_all: bool) -> None:
    missing: list[int] = []
    for r in range(1, group.size()):
        left = max(end - time.monotonic(), 0.001)  # time is up: one look at each of the others
        try:
            group.store.wait([f"{prefix}/{r}"], timedelta(seconds=left))
        except StoreTimeout:
            missing.append(r)
            if not wait_all:
                break
    if missing:
        names = ", ".join(map(str, missing))
        one = f"Rank {names}" if len(missing) == 1 else f"Ranks {names}"
        what = (
            f"Rank {group.rank()} timed out in monitoredBarrier: "
            f"{one} failed to pass monitoredBarrier in time"
        )
        group.store.set(f"{prefix}/answer", ",".join(map(str, missing)))
        raise _error(group, what, tuple(missing), limit_s)
    group.store.set(f"{prefix}/answer", "")


def _follow(group: GroupCore, prefix: str, end: float, limit_s: float) -> None:
    group.store.set(f"{prefix}/{group.rank()}", "came")
    left = max(end - time.monotonic(), 0.001) + 0.5
    try:
        group.store.wait([f"{prefix}/answer"], timedelta(seconds=left))
        answer = group.store.get(f"{prefix}/answer").decode()
    except StoreTimeout:
        raise _error(group, _REACHED.format(group.rank()), (0,), limit_s) from None
    if answer:
        missing = tuple(int(r) for r in answer.split(","))
        raise _error(group, _REACHED.format(group.rank()), missing, limit_s)


_REACHED = (
    "Rank {} successfully reached monitoredBarrier, but received errors while waiting for "
    "send/recv from rank 0"
)
