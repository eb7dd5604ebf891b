"""Who takes part in a round, and in what order: the rule by which hosts get their node numbers.

Of the agents that could take part,

- if each one's user fixed a node rank, they stand in that order. Of two with the same one, who took
  part in the round before goes first, then who came first; the other is a spare;
- otherwise those of the round before keep their order, then come newcomers with a fixed rank, by
  rank, then all others as they came.

The first `most` of them take part.
"""

from __future__ import annotations

from collections.abc import Sequence

from dure.launch.agent.events import Joined

__all__ = ["line_up"]


def line_up(willing: Sequence[Joined], before: Sequence[str], most: int) -> tuple[str, ...]:
    """Return the agents that take part, in the order of their nodes.

    Args:
        willing: Who could, in the order in which they came.
        before: The members of the round before, in the order of their nodes.
        most: How many there may be.
    """
    fixed: dict[int, Joined] = {}
    for a in sorted(willing, key=lambda a: a.agent not in before):
        if a.node_rank is not None:
            fixed.setdefault(a.node_rank, a)
    if all(a.node_rank is not None for a in willing):
        order = [fixed[rank] for rank in sorted(fixed)]
    else:
        order = sorted(willing, key=lambda a: _place(a, before))
    return tuple(a.agent for a in order[:most])


def _place(joined: Joined, before: Sequence[str]) -> tuple[int, bool, int]:
    """Return a key that sorts agents of whom not all have a fixed rank."""
    seat = before.index(joined.agent) if joined.agent in before else len(before)
    return seat, joined.node_rank is None, joined.node_rank or 0
