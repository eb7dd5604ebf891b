"""What the operations of a hybrid group are made of: its parts, and waiting for them.

`local` joins the ranks of this host in shared memory. `lane` is the engine that joins this rank
with its like on the other hosts, if it is in a lane. `mesh` is the engine that joins all ranks of
all hosts; it carries what goes from one rank to one other.

The engines' own time limits are out of reach: every wait here ends when the group is broken or
left, or when the group's time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dure.comm.backends.base import Backend, Ticket
from dure.comm.backends.hybrid.fate import Fate
from dure.comm.backends.hybrid.hosts import Hosts
from dure.comm.backends.shm.backend import ShmBackend
from dure.errors import CommTimeout

__all__ = ["Links"]

_NUM_TAGS = 1 << 30
"""How many tags an engine has, if it does not say."""

_SLICE_S = 0.05


def _nobody_known() -> tuple[int, ...]:
    return ()


@dataclass(slots=True, kw_only=True)
class Links:
    """The parts of a hybrid group on one rank.

    Attributes:
        hosts: Who is where.
        local: The ranks of this host.
        lane: This rank's lane; None if it is in none.
        mesh: All ranks.
        fate: Whether the group is broken.
        absent: Tells which ranks have not begun the current operation, as far as known.
    """

    hosts: Hosts
    local: ShmBackend
    lane: Backend | None
    mesh: Backend
    fate: Fate
    absent: Callable[[], tuple[int, ...]] = field(default=_nobody_known)

    @property
    def here(self) -> int:
        """Number of this rank's host."""
        return self.hosts.here

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(self.hosts.ranks)

    @property
    def mesh_tags(self) -> tuple[int, int, int]:
        """Tags between hosts, of which some engines have few.

        That of messages that are part of a collective, that of what announces a message, and how
        many are left to number the messages.
        """
        num_tags = min(_NUM_TAGS, getattr(self.mesh, "num_tags", _NUM_TAGS))
        return num_tags - 1, num_tags - 2, num_tags - 2

    @property
    def timeout_s(self) -> float:
        """How long an operation may wait."""
        return self.fate.timeout_s

    def wait(self, ticket: Ticket | None, op: str) -> None:
        """Wait for an engine's work.

        Raises:
            CommError: The group was broken or left, the engine failed, or time is up.
        """
        if ticket is None:
            return
        until = time.monotonic() + self.timeout_s
        while not ticket.wait(_SLICE_S):
            self.fate.check(op)
            if time.monotonic() > until:
                raise CommTimeout(
                    "not all ranks called in time",
                    missing=self.absent(),
                    elapsed_s=self.timeout_s,
                    seen=f"the timeout of {self.timeout_s:g} s passed",
                    fix="Look what the missing ranks are doing (py-spy dump --pid), "
                    "or give the group a longer timeout.",
                )
