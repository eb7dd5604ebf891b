"""A new store for the ranks that are left when the process that held the store has died.

Where no launcher and no file holds the store, rank 0's process does, and its keys die with it.
The ranks that are left, all on one host, then meet at a Unix socket (`LocalPlace`) whose name is
made of two members' tokens, which only the ranks of this meeting know. The lowest rank that lives
serves; the others dial, and go on to the next rank if that one dies meanwhile. So all of them come
to the same store, each from its own list of members alone.

The new store is empty: what was set in the old one is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dure.errors import StoreLost, StoreTimeout
from dure.store.base import Store
from dure.store.identity import alive
from dure.store.membership import Member
from dure.store.places import LocalPlace

__all__ = ["succeed"]

_TRY_S = 0.1


def succeed(
    members: Sequence[Member], me: Member, gone: Callable[[int], bool], timeout_s: float
) -> tuple[Store, Member]:
    """Open the store of the members that are left.

    Args:
        members: All members of the meeting, by rank.
        me: This rank.
        gone: Tells of a rank whether it is known to have died, or left.
        timeout_s: How long to look for the new host.

    Returns:
        The store, and the member that holds it.

    Raises:
        StoreLost: The next rank, which lives, does not open a store; or ranks are on other hosts.

    Collective:
        All members that are left call.
    """
    if any(member.host_id != me.host_id for member in members):
        raise StoreLost(
            "the process that held the store has ended",
            rank=me.rank,
            seen="the ranks that are left are on several hosts",
            fix="Keep rank 0 alive, or meet in a file on a disk that all hosts share.",
        )
    deadline = time.monotonic() + timeout_s
    for host in members:
        place = LocalPlace(name=f"{members[0].token}/{host.token}")
        if host.rank == me.rank:
            return place.open(0, len(members), timeout_s), me
        while not gone(host.rank) and alive(host.process) is not False:
            try:
                return place.open(host.rank or 1, len(members), _TRY_S), host
            except StoreTimeout:
                if time.monotonic() > deadline:
                    raise _absent(host, me, timeout_s) from None
    raise StoreLost("no rank is left to hold the store", rank=me.rank)


def _absent(host: Member, me: Member, timeout_s: float) -> StoreLost:
    return StoreLost(
        "the process that held the store has ended, and the next does not take its place",
        rank=me.rank,
        peer=host.rank,
        elapsed_s=timeout_s,
        seen=f"{host} lives, but did not call",
        fix="All ranks that are left must call shrink (or new_group).",
    )
