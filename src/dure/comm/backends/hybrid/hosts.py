"""Which ranks of a group share a host, and which of them speaks with other hosts.

Words used by all files of the hybrid backend:

* *host*: ranks that reach each other's memory. Hosts are in the order of their lowest rank, the
  ranks of a host in ascending order; a rank's place among them is its *local* number.
* *lane*: there are as many lanes as the smallest host has ranks. Lane j joins the ranks with local
  number j of all hosts, by an engine of its own, so that every network connection carries a part.
* *leader*: the rank of a host with local number 0. Leaders, which are lane 0, open operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dure.comm.backends.base import BackendOptions
from dure.store.identity import Identity, myself

__all__ = ["Hosts", "Resident", "find_residents", "group_by_host"]


class Resident(msgspec.Struct, array_like=True, frozen=True):
    """A rank's process, and where it says that it lives."""

    process: Identity
    home: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The ranks of a group by host, seen from one of them.

    Attributes:
        ranks: Group ranks of each host.
        names: Name of each host, for people.
        rank: This rank.
        here: Number of this rank's host.
        local: This rank's place in its host.
        num_lanes: How many ranks of each host speak with other hosts.
    """

    ranks: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    rank: int
    here: int
    local: int
    num_lanes: int

    @property
    def mine(self) -> tuple[int, ...]:
        """Ranks of this host."""
        return self.ranks[self.here]

    @property
    def size(self) -> int:
        """Ranks of all hosts."""
        return sum(map(len, self.ranks))

    @property
    def is_leader(self) -> bool:
        """Whether this rank opens operations for its host."""
        return self.local == 0

    @property
    def lane(self) -> int | None:
        """The lane that this rank is in, if it is in one."""
        return self.local if self.local < self.num_lanes else None

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return host and local number of `rank`."""
        for host, ranks in enumerate(self.ranks):
            if rank in ranks:
                return host, ranks.index(rank)
        raise ValueError(f"rank {rank} is on no host")

    def describe(self, host: int) -> str:
        """Name a host and its ranks."""
        ranks = self.ranks[host]
        plural = "s" if len(ranks) > 1 else ""
        return f"host {self.names[host]} (rank{plural} {', '.join(map(str, ranks))})"


def group_by_host(homes: Sequence[tuple[str, str]], rank: int) -> Hosts:
    """Sort ranks into hosts.

    Args:
        homes: For each rank, what is equal for ranks of one host, and the host's name.
        rank: This rank.
    """
    by_home: dict[str, list[int]] = {}
    for r, (home, _) in enumerate(homes):
        by_home.setdefault(home, []).append(r)
    ranks = tuple(map(tuple, by_home.values()))
    here = next(h for h, members in enumerate(ranks) if rank in members)
    return Hosts(
        ranks=ranks,
        names=tuple(homes[members[0]][1] for members in ranks),
        rank=rank,
        here=here,
        local=ranks[here].index(rank),
        num_lanes=min(map(len, ranks)),
    )


def find_residents(options: BackendOptions, home: str, what: str) -> list[Resident]:
    """Tell the others where this rank lives, and learn where they do.

    Args:
        options: What the group is; its store is where they meet.
        home: Equal for ranks that share a host.
        what: Sets one such question of a group apart from the next.

    Collective:
        All ranks of the group call.
    """
    keys = [f"hosts/{what}/{rank}" for rank in range(options.size)]
    mine = msgspec.msgpack.encode(Resident(myself(), home))
    options.store.set(keys[options.rank], mine)
    options.store.wait(keys, options.timeout)
    return [msgspec.msgpack.decode(x, type=Resident) for x in options.store.multi_get(keys)]
