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
    prefix = f"monitored/{group.num_monitored}"
    if group.rank() == 0:
        missing = _lead(group, prefix, limit_s, wait_all_ranks)
        named = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        what = (
            f"Rank 0 timed out in monitoredBarrier: {named} failed to pass monitoredBarrier in time"
        )
    else:
        missing = _follow(group, prefix, limit_s)
        what = (
            f"Rank {group.rank()} successfully reached monitoredBarrier, but received errors while "
            "waiting for send/recv from rank 0"
        )
    if missing:
        raise CommTimeout(
            what,
            op="monitored_barrier",
            group=group.group_name,
            rank=group.rank(),
            world_size=group.size(),
            elapsed_s=limit_s,
            missing=missing,
            peer=missing[0],
            fix="Look at what those ranks do instead (py-spy, their last lines of output).",
        )


def _lead(group: GroupCore, prefix: str, limit_s: float, wait_all: bool) -> tuple[int, ...]:
    end = time.monotonic() + limit_s
    missing: list[int] = []
    for r in range(1, group.size()):
        left = max(end - time.monotonic(), 0.001)  # time is up: one look at each of the others
        try:
            group.store.wait([f"{prefix}/{r}"], timedelta(seconds=left))
        except StoreTimeout:
            missing.append(r)
            if not wait_all:
                break
    group.store.set(f"{prefix}/answer", ",".join(map(str, missing)))
    return tuple(missing)


def _follow(group: GroupCore, prefix: str, limit_s: float) -> tuple[int, ...]:
    group.store.set(f"{prefix}/{group.rank()}", "came")
    try:
        group.store.wait([f"{prefix}/answer"], timedelta(seconds=limit_s + 0.5))
    except StoreTimeout:
        return (0,)
    answer = group.store.get(f"{prefix}/answer").decode()
    return tuple(int(r) for r in answer.split(",") if r)
