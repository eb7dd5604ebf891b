"""What the job's user decided of its hosts and restarts, as far as the machine needs it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the job's user decided; equal on all agents (the first agent's count).

    Args:
        min_hosts: Fewer make no round.
        max_hosts: More are spares.
        max_restarts: How many failures the job outlives.
        join_timeout_s: How long to wait for `min_hosts`.
        last_call_s: How long the first round then waits for more.
        exclude_after: How many rounds running a host may be the first to fail.
        min_ranks: An elastic job with fewer living ranks ends.
        quorum: A part of the job that may be the smaller one does not go on.
        endpoint: Where hosts meet, for people.
    """

    min_hosts: int = 1
    max_hosts: int = 1
    max_restarts: int = 0
    join_timeout_s: float = 600.0
    last_call_s: float = 5.0
    exclude_after: int = 3
    min_ranks: int = 1
    quorum: bool = True
    endpoint: str = ""
