"""The parts of a hybrid group: hosts, and the sub-communicators of their ranks.

Terms used by all files of the hybrid backend:

* *host*: ranks that reach each other's memory. Hosts are in the order of their lowest rank, the
  ranks of a host in ascending order; a rank's place among them is its *local* number.
* *rail*: there are as many rails as the smallest host has ranks. Rail j joins the ranks with local
  number j of all hosts, by an engine of its own, so that every network connection carries a part.
* *leader*: the rank of a host with local number 0. Leaders, which are rail 0, exchange headers.

Each rank has up to three sub-communicators (`SubComms`): `local` joins the ranks of this host in
shared memory; `rail` is the engine that joins the ranks of this rank's rail, if it is in one; and
`mesh` is the engine that joins all ranks of all hosts, and carries messages between two ranks. On
hosts of one rank the only rail is the mesh.

The engines' time limits are set so high that they never apply: every wait here ends when the group
is broken or left, or at the group's timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from dure.comm.backends.base import Backend
from dure.comm.backends.request import Request
from dure.comm.backends.shm.backend import ShmBackend
from dure.errors import CommTimeout

if TYPE_CHECKING:
    from dure.comm.backends.hybrid.state import HybridState

__all__ = [
    "ANNOUNCING_TAG",
    "COLLECTIVE_TAG",
    "LOCAL_SLACK",
    "NUM_NUMBERS",
    "Hosts",
    "SubComms",
    "group_by_host",
]

LOCAL_SLACK = timedelta(seconds=1)
"""How much longer the ranks of a host wait for each other: one of them may wait for another host,
and then its error names the missing ranks."""

NUM_NUMBERS = 1 << 19
"""Numbers of messages between hosts, which are their tags at the engine: Gloo and the usual MPIs
have as many tags, and no two ranks have as many pending messages."""

ANNOUNCING_TAG, COLLECTIVE_TAG = NUM_NUMBERS, NUM_NUMBERS + 1
"""Tags of envelopes, and of messages that are part of a collective."""

_SLICE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The ranks of a group by host, seen from one of them.

    Attributes:
        ranks: Group ranks of each host.
        names: Name of each host, for messages.
        rank: This rank.
        here: Number of this rank's host.
        local: This rank's place in its host.
        num_rails: How many ranks of each host are in a rail.
        places: Host and local number of each rank.
    """

    ranks: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    rank: int
    here: int
    local: int
    num_rails: int
    places: tuple[tuple[int, int], ...]

    @property
    def mine(self) -> tuple[int, ...]:
        """Ranks of this host."""
        return self.ranks[self.here]

    @property
    def size(self) -> int:
        """Ranks of all hosts."""
        return len(self.places)

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader of its host."""
        return self.local == 0

    @property
    def rail(self) -> int | None:
        """The rail that this rank is in, if it is in one."""
        return self.local if self.local < self.num_rails else None

    def describe(self, host: int) -> str:
        """Name a host and its ranks."""
        ranks = self.ranks[host]
        plural = "s" if len(ranks) > 1 else ""
        return f"host {self.names[host]} (rank{plural} {', '.join(map(str, ranks))})"


def group_by_host(homes: Sequence[tuple[str, str]], rank: int) -> Hosts:
    """Sort ranks into hosts.

    Args:
        homes: For each rank the id of its host, equal for ranks of one host, and the host's name.
        rank: This rank.
    """
    by_home: dict[str, list[int]] = {}
    for r, (home, _) in enumerate(homes):
        by_home.setdefault(home, []).append(r)
    ranks = tuple(map(tuple, by_home.values()))
    place_of = {r: (h, i) for h, members in enumerate(ranks) for i, r in enumerate(members)}
    return Hosts(
        ranks=ranks,
        names=tuple(homes[members[0]][1] for members in ranks),
        rank=rank,
        here=place_of[rank][0],
        local=place_of[rank][1],
        num_rails=min(map(len, ranks)),
        places=tuple(place_of[r] for r in range(len(homes))),
    )


@dataclass(slots=True, kw_only=True)
class SubComms:
    """The sub-communicators of a hybrid group on one rank.

    Attributes:
        hosts: The ranks by host.
        local: The ranks of this host.
        rail: This rank's rail; None if it is in none.
        mesh: All ranks.
        state: Whether the group is broken.
        absent: Returns the ranks that have not begun the current operation, as far as known.
    """

    hosts: Hosts
    local: ShmBackend
    rail: Backend | None
    mesh: Backend
    state: HybridState
    absent: Callable[[], tuple[int, ...]] = tuple

    def wait(self, request: Request | None, op: str) -> None:
        """Wait for an engine's work.

        Raises:
            CommError: The group was broken or left, the engine failed, or time is up.
        """
        if request is None:
            return
        if not self.wait_until(request, op, time.monotonic() + self.state.timeout_s):
            raise CommTimeout(
                "not all ranks called in time",
                missing=self.absent(),
                elapsed_s=self.state.timeout_s,
                seen=f"the timeout of {self.state.timeout_s:g} s passed",
                fix="Check what the missing ranks are doing (py-spy dump --pid), "
                "or give the group a longer timeout.",
            )

    def wait_until(self, request: Request, op: str, limit: float | None) -> bool:
        """Wait for work of an engine or of shared memory; return False at `limit`.

        Raises:
            CommError: The group was broken or left, or the work failed.
        """
        while True:
            left_s = _SLICE_S if limit is None else min(_SLICE_S, limit - time.monotonic())
            if request.wait(max(0.0, left_s)):
                return True
            self.state.check(op)
            if left_s <= 0:
                return False

    def close(self, abort: bool) -> None:
        """Leave all of them."""
        self.state.left.set()
        for backend in [self.local, *self.state.engines]:
            backend.close(abort)
