"""The arguments from which a group is made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch

__all__ = ["GroupSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The arguments from which a group is made.

    Attributes:
        name: The same on all members, different from that of every other group of the world.
        global_ranks: Members, in the order of their group ranks.
        backend: Name of a backend, or "cpu:gloo,cuda:nccl".
        timeout: How long an operation waits for its peers.
        creation_timeout: How long its creation waits for members, and the default for groups that
            are made from it; `timeout` if None.
        desc: The user's description.
        pg_options: Options of the backend.
        device_id: The device that this rank is bound to.
        why: Why it has this backend, for the log.
        local: Whether only the members call, so that its name has the number of groups of these
            ranks that were made in this way.
    """

    name: str
    global_ranks: tuple[int, ...]
    backend: str
    timeout: timedelta
    desc: str = ""
    pg_options: object = None
    device_id: torch.device | None = None
    creation_timeout: timedelta | None = None
    why: str = ""
    local: bool = False

    @property
    def creation_limit(self) -> timedelta:
        """How long its creation waits for members."""
        return self.creation_timeout or self.timeout
