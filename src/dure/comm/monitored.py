"""A barrier that names the missing ranks, and leaves the group usable when it fails.

It runs over the store, not over the backend, so that it works when the backend is stuck: rank 0
waits for one key of every other rank, then answers with one key for all.

When all ranks have called, rank 0 removes their keys, and the answer of the barrier before, which
all have read. The keys of a barrier that failed stay as long as the group, for ranks that are late.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from dure.comm.checks import duration
from dure.comm.world import resolve
from dure.errors import CommTimeout, StoreError, StoreTimeout, UsageError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.comm.group.core import GroupCore


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait for all ranks; if some do not call, all others raise an error that names them.

    Args:
        group: The group; the default group if None.
        timeout: A timedelta, or seconds; the group's timeout if None.
        wait_all_ranks: If True, rank 0 waits for all ranks, and names every missing one; else it
            stops at the first.

    Raises:
        CommTimeout: On every rank that called; `missing` has the missing ranks.

    Collective:
        All ranks call. The group can be used after an error.

    Cost:
        n + 1 keys in the store, which rank 0 removes: milliseconds. Not for inner loops.

    Example:
        ```python
        dist.monitored_barrier(timeout=10.0)                 # CommTimeout names late ranks
        ```
    """
    group = resolve(group, "monitored_barrier")
    limit = group.timeout if timeout is None else duration(timeout, "monitored_barrier")
    limit_s = limit.total_seconds()
    if limit_s < 0:
        raise UsageError("the timeout is negative", op="monitored_barrier", seen=f"{limit_s} s")
    if group.backend_name == "fake":
        return  # the other ranks do not exist
    group.refuse_in_child("monitored_barrier")
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
    keys = {f"{prefix}/{r}": r for r in range(1, group.size())}
    missing: list[int] = []
    for key, r in keys.items():
        left = max(end - time.monotonic(), 0.001)  # time is up: one look at each of the others
        try:
            group.store.wait([key], timedelta(seconds=left))
        except StoreTimeout:
            missing.append(r)
            if not wait_all:
                break
    group.store.set(f"{prefix}/answer", ",".join(map(str, missing)))
    if not missing:  # all have come to this barrier, so they have read the last one's answer
        with suppress(StoreError):
            for key in [*keys, f"monitored/{group.num_monitored - 1}/answer"]:
                group.store.delete_key(key)
    return tuple(missing)


def _follow(group: GroupCore, prefix: str, limit_s: float) -> tuple[int, ...]:
    group.store.set(f"{prefix}/{group.rank()}", "came")
    try:
        group.store.wait([f"{prefix}/answer"], timedelta(seconds=limit_s + 0.5))
    except StoreTimeout:
        return (0,)
    answer = group.store.get(f"{prefix}/answer").decode()
    return tuple(int(r) for r in answer.split(",") if r)
