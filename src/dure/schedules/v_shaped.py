"""Schedules for stages in a V (there and back), two per rank: ZB-V and DualPipe-V.

Rank r of p has stage r and stage 2p - 1 - r, so rank 0 has the first and the last: a microbatch's
backward starts where its forward did, and the ranks hold about as many activations each.

*ZB-V* splits all backwards. It keeps at most 2p activations of half a rank's work and, where
forward, I and W take equally long, has no bubble but while the pipeline fills.
*DualPipe-V* pairs the forward of one microbatch with the backward of another in one action
(OVERLAP_F_B), so that one's communication hides behind the other's computation; it splits only the
backwards at both ends.

Sources: ZB-V, https://arxiv.org/abs/2401.10241, section 6, and torch's order of it; DualPipe-V,
https://github.com/deepseek-ai/DualPipe.
"""

from __future__ import annotations

from dure.schedules.actions import Action, Kind, Schedule

__all__ = ["dualpipe_v", "zb_v"]

F, B, I, W = Kind.FORWARD, Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


class _Writer:
    """Writes the list of one rank: its microbatches are numbered as they come.

    Attributes:
        down: The rank's stage on the way to the last rank.
        up: Its stage on the way back.
    """

    def __init__(self, rank: int, p: int) -> None:
        self.down, self.up = rank, 2 * p - 1 - rank
        self.actions: list[Action] = []
        self.done = {(stage, kind): 0 for stage in (self.down, self.up) for kind in (F, B)}
        self.weights: list[Action] = []

    def next(self, stage: int, kind: Kind) -> Action:
        """Return the stage's next forward or backward; an I's W joins the queue."""
        count = (stage, F if kind is F else B)
        action = Action(stage, kind, self.done[count])
        self.done[count] += 1
        if kind is I:
            self.weights.append(Action(stage, W, action.microbatch))
        return action

    def add(self, *actions: tuple[int, Kind]) -> None:
        """Add the next of each (stage, kind)."""
        self.actions += [self.next(stage, kind) for stage, kind in actions]

    def weight(self, *stages: int) -> None:
        """Add the oldest W that is due of `stages`, if any."""
        due = next((action for action in self.weights if action.stage in stages), None)
        if due is not None:
            self.weights.remove(due)
            self.actions.append(due)

    def overlap(self, forward: int, backward: int) -> None:
        parts = (self.next(forward, F), self.next(backward, B))
        self.actions.append(Action(-1, Kind.OVERLAP_F_B, None, parts))


def zb_v(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """Return ZB-V; with fewer than 2p - 1 microbatches, the list for 2p - 1 without the rest.

    Args:
        placement: For each stage its rank: `v_placement`, with two stages per rank.
        microbatches: How many microbatches.

    Returns:
        A grid.

    Example:
        ```python
        from dure import schedules

        schedule = schedules.zb_v(schedules.v_placement(4, 2), microbatches=4)
        assert schedules.validate(schedule)
        ```
    """
    p = max(placement) + 1
    ranks = tuple(
        tuple(a for a in _zb_v_rank(rank, p, microbatches) if (a.microbatch or 0) < microbatches)
        for rank in range(p)
    )
    return Schedule(ranks, placement, microbatches, "zb-v")


def _zb_v_rank(rank: int, p: int, microbatches: int) -> list[Action]:
    total = max(2 * p - 1, microbatches)
    w = _Writer(rank, p)
    down, up = w.down, w.up
    for _ in range(2 * (p - rank) - 1):
        w.add((down, F))
    for _ in range(rank):
        w.add((up, F), (down, F))
    for _ in range(p - rank):
        w.add((up, F), (up, I))
        w.weight(up)
    while w.done[up, F] < total:
        if w.done[down, F] < total:
            w.add((down, F))
        w.add((down, I))
        w.weight(down)
        w.add((up, F), (up, I))
        w.weight(up)
    for _ in range(rank):
        w.add((down, I), (up, I))
    for _ in range(p - rank):
        w.add((down, I))
        w.weight(down)
    for stage in (up, down):
        while any(action.stage == stage for action in w.weights):
            w.weight(stage)
    return w.actions


def dualpipe_v(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """Return DualPipe-V, for at least as many microbatches as there are stages.

    Args:
        placement: For each stage its rank: `v_placement`, with two stages per rank.
        microbatches: How many microbatches.

    Returns:
        A grid.

    Example:
        ```python
        schedule = schedules.dualpipe_v(schedules.v_placement(4, 2), microbatches=4)
        assert schedules.validate(schedule)
        ```
    """
    p = max(placement) + 1
    ranks = tuple(tuple(_dualpipe_v_rank(rank, p, microbatches)) for rank in range(p))
    return Schedule(ranks, placement, microbatches, "dualpipe-v")


def _dualpipe_v_rank(rank: int, p: int, microbatches: int) -> list[Action]:
    w = _Writer(rank, p)
    down, up, last = w.down, w.up, rank == p - 1
    after = p - rank - 1  # ranks behind this one
    for _ in range(2 * after):
        w.add((down, F))
    for _ in range(rank + 1):
        w.add((down, F), (up, F))
    for _ in range(after):
        w.add((up, I))
        w.weight(up, down)
        w.add((up, F))
    for step in range(microbatches - 2 * p + rank + 1):
        if step == 0 and last:  # its own forward is what the backward waits for
            w.add((down, F), (up, B))
        else:
            w.overlap(down, up)
        w.overlap(up, down)
    for _ in range(after):
        w.add((up, B))
        w.overlap(up, down)
    # Split backwards start in the middle of the last ones: behind `up`'s or behind `down`'s.
    switch = 2 * ((rank + 1) // 2) + (1 if rank % 2 == 0 else 0)
    for i in range(2 * (rank + 1)):
        w.add((down if i % 2 else up, I if i >= switch else B))
    for _ in range(after):
        w.weight(up, down)
        w.add((down, I))
    for _ in range(rank + 1):
        w.weight(up, down)
    return w.actions
