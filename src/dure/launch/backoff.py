"""How long a job pauses before a restart, so that one that always fails does not busy its hosts."""

from __future__ import annotations

__all__ = ["SHORT_ROUND_S", "restart_delay"]

SHORT_ROUND_S = 10.0
"""A round that fails sooner has hardly done any work, so the next one may fail as well."""


def restart_delay(short_rounds: int, longest_s: float) -> float:
    """Return how many seconds to wait before the next restart.

    Args:
        short_rounds: How many rounds in a row have failed within 10 seconds.
        longest_s: Never wait longer than this.

    Example:
        0, 0, 1, 2, 4, 8, ... seconds after 0, 1, 2, 3, 4, 5, ... rounds.
    """
    if short_rounds < 2:
        return 0.0
    return min(longest_s, 2.0 ** min(short_rounds - 2, 30))
