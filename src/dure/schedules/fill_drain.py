"""Schedules that fill the pipeline with forwards, then drain it: GPipe, looped BFS, forward-only.

All microbatches go forward before the first goes back, so each rank holds the activations of all
of them. With one stage a rank, m microbatches and p ranks, a rank idles p - 1 of m + p - 1 slots;
with v stages a rank, p - 1 of v m + p - 1.

Sources: GPipe, https://arxiv.org/abs/1811.06965; breadth-first pipelines (looped BFS),
https://arxiv.org/abs/2211.05953.
"""

from __future__ import annotations

from dure.schedules.actions import Action, Kind, Schedule

__all__ = ["forward_only", "gpipe", "looped_bfs"]


def gpipe(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """Return all forwards, then all backwards, in order of microbatches.

    Args:
        placement: For each stage its rank.
        microbatches: How many microbatches.

    Returns:
        A grid.

    Example:
        ```python
        from dure import schedules

        schedule = schedules.gpipe((0, 1), microbatches=2)
        first = [str(action) for action in schedule.ranks[0] if action]
        assert first == ["0F0", "0F1", "0B0", "0B1"]
        ```
    """
    return _breadth_first("gpipe", placement, microbatches, range(microbatches))


def looped_bfs(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """Return the forwards of each local stage in turn; then backwards, the last forward first.

    Args:
        placement: For each stage its rank.
        microbatches: How many microbatches.

    Returns:
        A grid.

    Example:
        ```python
        schedule = schedules.looped_bfs(schedules.loop_placement(4, 2), microbatches=2)
        first = [str(action) for action in schedule.ranks[0] if action]
        assert first[:4] == ["0F0", "0F1", "2F0", "2F1"]
        ```
    """
    return _breadth_first("looped-bfs", placement, microbatches, range(microbatches)[::-1])


def forward_only(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """Return the forwards of each local stage in turn, as an evaluation needs them.

    Args:
        placement: For each stage its rank.
        microbatches: How many microbatches.

    Returns:
        A grid.

    Example:
        ```python
        schedule = schedules.forward_only((0, 1), microbatches=2)
        assert [str(action) for action in schedule.ranks[1] if action] == ["1F0", "1F1"]
        ```
    """
    return _breadth_first("forward-only", placement, microbatches, range(0))


def _breadth_first(
    name: str, placement: tuple[int, ...], microbatches: int, back: range
) -> Schedule:
    """Go through the stages of a rank one after the other; `back` is the order of backwards."""
    ranks: list[tuple[Action, ...]] = []
    for rank in range(max(placement) + 1):
        local = [stage for stage, where in enumerate(placement) if where == rank]
        forwards = [Action(s, Kind.FORWARD, m) for s in local for m in range(microbatches)]
        backwards = [Action(s, Kind.FULL_BACKWARD, m) for s in local[::-1] for m in back]
        ranks.append((*forwards, *backwards))
    return Schedule(tuple(ranks), placement, microbatches, name)
