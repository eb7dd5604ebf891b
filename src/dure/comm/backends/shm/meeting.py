"""How the ranks of a group come to share one segment.

Rank 0 makes the segment and publishes "pid:fd:nonce" under "shm/segment". A rank that cannot map it
says so under "shm/refused", so that all ranks raise the same error at once.
"""

from __future__ import annotations

import os
import secrets
import time

from dure.comm.backends.base import BackendOptions
from dure.errors import DureError, RendezvousError, RendezvousTimeout, UsageError
from dure.native import Group, require

__all__ = ["MAX_RANKS", "open_segment"]

MAX_RANKS = 256
_SEGMENT_KEY = "shm/segment"
_REFUSED_KEY = "shm/refused"


def open_segment(options: BackendOptions) -> Group:
    """Make the group's segment, or map it; return when all ranks have.

    Raises:
        UsageError: The engine is not built, this is not Linux, or there are too many ranks.
        RendezvousError: A rank cannot map the segment; the same on all ranks.
        RendezvousTimeout: Not all ranks came within the group's timeout.
    """
    require()
    if options.size > MAX_RANKS:
        raise UsageError(
            f"the shm backend takes at most {MAX_RANKS} ranks",
            seen=f"the group has {options.size}",
            fix="Use the gloo backend.",
        )
    deadline = time.monotonic() + options.timeout.total_seconds()
    try:
        group = _open(options)
    except (OSError, RuntimeError) as error:
        if isinstance(error, DureError):
            raise
        reason = f"rank {options.rank} (pid {os.getpid()}, uid {os.getuid()}): {error}"
        # Others may fail because this rank did: the first reason is the one to tell.
        first = options.store.compare_set(_REFUSED_KEY, "", reason)
        if options.rank == 0:
            options.store.set(_SEGMENT_KEY, "")  # nobody need wait for it
        raise _refused(options, first.decode()) from None
    while group.attached() < options.size:
        if options.store.check([_REFUSED_KEY]):
            group.close()
            raise _refused(options, options.store.get(_REFUSED_KEY).decode())
        if time.monotonic() > deadline:
            missing = group.not_attached()
            group.close()
            raise RendezvousTimeout(
                "not all ranks mapped the group's shared segment",
                came=tuple(r for r in range(options.size) if r not in missing),
                missing=tuple(missing),
                group=options.name,
                rank=options.rank,
                world_size=options.size,
            )
        group.wait_attached(0.05)
    group.ready()
    return group


def _open(options: BackendOptions) -> Group:
    timeout_s = options.timeout.total_seconds()
    cores = max(1, len(os.sched_getaffinity(0)) // options.threads)
    if options.rank == 0:
        nonce = secrets.randbits(63)
        group = Group.create(0, options.size, timeout_s, cores, nonce)
        options.store.set(_SEGMENT_KEY, f"{os.getpid()}:{group.file}:{nonce}")
        return group
    options.store.wait([_SEGMENT_KEY], options.timeout)
    place = options.store.get(_SEGMENT_KEY)
    if not place:
        raise RuntimeError("rank 0 could not make the segment")
    pid, fd, nonce = map(int, place.split(b":"))
    return Group.attach(options.rank, options.size, timeout_s, cores, pid, fd, nonce)


def _refused(options: BackendOptions, reason: str) -> RendezvousError:
    return RendezvousError(
        "the ranks cannot share memory",
        group=options.name,
        rank=options.rank,
        world_size=options.size,
        seen=reason,
        fix="Run all ranks on one host, in one container, as one user; or use backend='gloo'.",
    )
