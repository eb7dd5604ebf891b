"""When a round hangs: no output, no step and no finished operation of any rank for too long.

A rank that computes or waits looks the same from outside, so the launcher looks at what ranks do:
lines that they write, steps that they report (`dure.progress`), and collectives. The last operation
of a rank is known only if the launcher asks for it. So after half of the time without output and
steps it asks all ranks, after the full time again, and compares:

    quiet for S/2: first question      quiet for S: second question, and the answers are compared
    ─────────────────┴───────────────────────────────┴──────────────▶ the same: the round hangs

A rank that does not answer counts as one with the same answer.

On several hosts each launcher sees its own ranks only. If all of them wait in an operation, the
rank that they wait for is probably on another host. So the launcher lets the same time pass once
more, in which the other one acts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["HangDetector", "likely_cause"]

_ANSWER_S = 1.0
_SINCE = re.compile(r", (?:ended|failed with .*) \S+ s earlier$")
_WAITING = "still in it"


class HangDetector:
    """Decides whether a round hangs; without any input or output.

    Args:
        after_s: How long a round may show no sign of work.
        now: When it began.
        alone: Whether no rank of the job is on another host.

    Example:
        `active` is called for each sign of work, `tick` when the time `wake_at` has come. `tick`
        returns "ask" (ask all ranks for their last operation), "hung" or "".
    """

    def __init__(self, after_s: float, now: float, *, alone: bool = True) -> None:
        self.after_s = after_s
        self._alone = alone
        self._deferred = False
        self._quiet_since = now
        self._questions = 0
        self._before: Mapping[int, str] = {}

    def active(self, now: float) -> None:
        """A rank has shown a sign of work."""
        self._quiet_since = now
        self._questions = 0
        self._deferred = False

    def quiet_s(self, now: float) -> float:
        """Return for how long no rank has shown a sign of work."""
        return now - self._quiet_since

    @property
    def wake_at(self) -> float:
        """When to call `tick` at the latest."""
        answer_s = min(_ANSWER_S, self.after_s / 4)
        after_s = (self.after_s / 2, self.after_s, self.after_s + answer_s)
        return self._quiet_since + after_s[self._questions]

    def tick(self, last: Mapping[int, str], now: float) -> str:
        """Return what to do.

        Args:
            last: The last operation of each rank that runs, as far as ranks have answered.
            now: The time.
        """
        if now < self.wake_at:
            return ""
        operations = {rank: _SINCE.sub("", text) for rank, text in last.items()}
        if self._questions < 2:
            if self._questions == 1:
                self._before = operations
            self._questions += 1
            return "ask"
        changed = any(
            text and text != self._before.get(rank, text) for rank, text in operations.items()
        )
        if changed:
            self.active(now)
            return ""
        if not self._alone and not self._deferred and all(map(_waits, last.values())):
            self.active(now)
            self._deferred = True
            return ""
        return "hung"


def likely_cause(last: Mapping[int, str]) -> int:
    """Return the rank that the others probably wait for: the first that waits in no operation."""
    free = [rank for rank, text in last.items() if not _waits(text)]
    return min(free or last)


def _waits(operation: str) -> bool:
    """Return whether a rank waits for others in its last operation."""
    return _WAITING in operation
