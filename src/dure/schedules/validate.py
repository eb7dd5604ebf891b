"""Checks that a schedule is whole: each action once, on its rank, in an order that can be.

What is checked of each list alone: its actions are of stages that lie on the rank; a forward stands
before its backward, and I before W; what comes from a stage on the same rank has been computed, and
in lists with transfers, what comes from another rank has been received and what is sent has been
computed; nothing is missing and nothing is there twice; a stage computes while it is unsharded.
Of each pair of ranks: the receives stand in the order of the sends. Whether ranks wait for each
other is another question: see `prove_no_deadlock`.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest

from dure.errors import ScheduleError
from dure.schedules.actions import Action, Kind, Schedule

__all__ = ["validate"]

# What has been done for a stage and a microbatch, as bits.
_DONE = {
    Kind.FORWARD: 1,
    Kind.BACKWARD_INPUT: 2,
    Kind.BACKWARD_WEIGHT: 4,
    Kind.FULL_BACKWARD: 6,
    Kind.RECV_F: 8,
    Kind.RECV_B: 16,
    Kind.SEND_F: 32,
    Kind.SEND_B: 64,
}
# What must have been done before, for the same stage and microbatch.
_BEFORE = {
    Kind.FULL_BACKWARD: Kind.FORWARD,
    Kind.BACKWARD_INPUT: Kind.FORWARD,
    Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT,
    Kind.SEND_F: Kind.FORWARD,
    Kind.SEND_B: Kind.BACKWARD_INPUT,
}
_STEP = {Kind.SEND_F: 1, Kind.RECV_B: 1, Kind.SEND_B: -1, Kind.RECV_F: -1}


def validate(schedule: Schedule) -> tuple[int, ...]:
    """Check a grid, or lists with transfers, and return each rank's peak of live activations.

    An activation is live from its forward to its B or W; without backwards, during its forward.

    Raises:
        ScheduleError: It is not whole; names rank, index and action, where there is one.
    """
    _check_shape(schedule)
    check = _Check(schedule)
    peaks = tuple(check.rank(rank) for rank in range(len(schedule.ranks)))
    check.nothing_missing()
    if schedule.has_transfers:
        _check_pairs(schedule)
    return peaks


def _check_shape(schedule: Schedule) -> None:
    ranks = len(schedule.ranks)
    lost = [stage for stage, rank in enumerate(schedule.placement) if not 0 <= rank < ranks]
    idle = sorted(set(range(ranks)) - set(schedule.placement))
    seen = ""
    if schedule.microbatches < 1 or not schedule.placement:
        seen = f"{schedule.stages} stages, {schedule.microbatches} microbatches"
    elif lost:
        seen = f"stage {lost[0]} on rank {schedule.placement[lost[0]]} of {ranks}"
    elif idle:
        seen = f"no stage on rank {idle[0]} of {ranks}"
    if seen:
        raise ScheduleError(
            "a schedule has at least one microbatch, and at least one stage on each rank",
            seen=seen,
            fix="Give one list for each rank of the placement.",
        )


class _Check:
    """What has been done so far, over all ranks."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.m = schedule, schedule.microbatches
        self.transfers = schedule.has_transfers
        self.done = bytearray(schedule.stages * self.m)
        kinds = {part.kind for rank in schedule.ranks for a in rank if a for part in a.parts}
        self.trains = bool(kinds & {Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
        self.weights = [0] * schedule.stages  # microbatches whose weights' gradients are there
        self.live = self.peak = 0

    def rank(self, rank: int) -> int:
        """Check a rank's list by itself; return its peak of live activations."""
        self.live = self.peak = 0
        actions = self.schedule.actions(rank)
        whole: dict[int, list[Kind]] = defaultdict(list)  # what was done with a stage as a whole
        sharded = {a.stage for a in actions if a.kind is Kind.UNSHARD}
        for index, action in enumerate(actions):
            try:
                for part in action.parts:
                    self._on_rank(rank, part)
                    if part.kind.of_stage:
                        self._whole_stage(part, whole[part.stage])
                        continue
                    if part.kind.is_compute and part.stage in sharded:
                        self._unsharded(part, whole[part.stage])
                    self._once(part)
            except ScheduleError as error:
                raise ScheduleError(
                    error.what,
                    rank=rank,
                    index=index,
                    action=str(action),
                    seen=error.seen,
                    fix=error.fix,
                ) from None
        return self.peak

    def _on_rank(self, rank: int, action: Action) -> None:
        stages, microbatch = self.schedule.stages, action.microbatch
        if not 0 <= action.stage < stages or (
            not action.kind.of_stage
            and not 0 <= (-1 if microbatch is None else microbatch) < self.m
        ):
            raise ScheduleError(
                "there is no such stage or microbatch",
                seen=f"{action} of {stages} stages and {self.m} microbatches",
                fix="Count both from 0.",
            )
        where = self.schedule.placement[action.stage]
        if where != rank:
            raise ScheduleError(
                "a rank has an action of a stage that lies on another",
                seen=f"stage {action.stage} lies on rank {where}",
                fix=f"Move it to rank {where}'s list, or place the stage on rank {rank}.",
            )

    def _once(self, action: Action) -> None:
        """Note that an action is done, if it can be now."""
        stage, kind, microbatch, _ = action
        at = stage * self.m + (microbatch or 0)
        if self.done[at] & _DONE[kind]:
            raise ScheduleError(
                "an action is there twice",
                seen=f"{action}, or a part of it, stands before",
                fix="Drop one of them; B is I and W in one.",
            )
        before = _BEFORE.get(kind)
        if before is not None and not self.done[at] & _DONE[before]:
            self._too_early(action, Action(stage, before, microbatch))
        if kind in _STEP:
            self._is_needed(action)
        elif kind is Kind.FORWARD:
            self._has_input(action, stage - 1, Kind.FORWARD, Kind.RECV_F)
            self._count(1)
        elif kind is not Kind.BACKWARD_WEIGHT:
            self._has_input(action, stage + 1, Kind.BACKWARD_INPUT, Kind.RECV_B)
        if kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_WEIGHT):
            self.weights[stage] += 1
            self._count(-1)
        self.done[at] |= _DONE[kind]

    def _count(self, change: int) -> None:
        self.live += change
        self.peak = max(self.peak, self.live)
        if not self.trains:
            self.live = 0

    def _has_input(self, action: Action, stage: int, computed: Kind, received: Kind) -> None:
        """Check that what comes from a neighbouring stage is there."""
        placement = self.schedule.placement
        if not 0 <= stage < len(placement):
            return
        if placement[stage] == placement[action.stage]:
            needed = Action(stage, computed, action.microbatch)
        elif self.transfers:
            needed = Action(action.stage, received, action.microbatch)
        else:
            return
        if not self.done[needed.stage * self.m + (needed.microbatch or 0)] & _DONE[needed.kind]:
            self._too_early(action, needed)

    def _too_early(self, action: Action, needed: Action) -> None:
        raise ScheduleError(
            "an action stands before what it needs",
            seen=f"{action} needs {needed}",
            fix=f"Put {needed} before it.",
        )

    def _is_needed(self, action: Action) -> None:
        """Check that a transfer goes from one rank to another."""
        placement, other = self.schedule.placement, action.stage + _STEP[action.kind]
        if not 0 <= other < len(placement) or placement[other] == placement[action.stage]:
            raise ScheduleError(
                "a transfer has no other rank to go to, or to come from",
                seen=f"{action} with {len(placement)} stages, placed on ranks {placement}",
                fix="Drop it: stages on one rank hand over by themselves.",
            )

    def _unsharded(self, action: Action, before: list[Kind]) -> None:
        """Check that a stage computes while it has its parameters."""
        if [kind for kind in before if kind is not Kind.REDUCE_GRAD][-1:] != [Kind.UNSHARD]:
            self._too_early(action, Action(action.stage, Kind.UNSHARD))

    def _whole_stage(self, action: Action, before: list[Kind]) -> None:
        """Check and note an action that has no microbatch."""
        kind, stage = action.kind, action.stage
        last = [k for k in before if k is not Kind.REDUCE_GRAD][-1:]
        if kind is Kind.REDUCE_GRAD:
            wrong = kind in before or self.weights[stage] < self.m
        else:
            wrong = (last == [Kind.UNSHARD]) == (kind is Kind.UNSHARD)
        if wrong:
            raise ScheduleError(
                "UNSHARD and RESHARD alternate, and REDUCE_GRAD comes once, behind all backwards",
                seen=f"{action} after {', '.join(before) or 'nothing'}, "
                f"{self.weights[stage]} of {self.m} backwards done",
                fix=f"Drop {action}, or move it.",
            )
        before.append(kind)

    def nothing_missing(self) -> None:
        """Check that all has been done."""
        placement, missing = self.schedule.placement, list[Action]()
        for stage, rank in enumerate(placement):
            kinds = [Kind.FORWARD]
            if self.trains:
                kinds += [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]
            if self.transfers:
                kinds += [
                    kind
                    for kind, step in _STEP.items()
                    if 0 <= stage + step < len(placement) and placement[stage + step] != rank
                    if self.trains or kind in (Kind.SEND_F, Kind.RECV_F)
                ]
            whole = sum(_DONE[kind] for kind in kinds)
            for m in range(self.m):
                done = self.done[stage * self.m + m]
                if done != whole:
                    missing += [Action(stage, k, m) for k in kinds if not done & _DONE[k]]
        if missing:
            rank = placement[missing[0].stage]
            shown = ", ".join(map(str, missing[:4])) + (" ..." if len(missing) > 4 else "")
            raise ScheduleError(
                "actions are missing",
                rank=rank,
                action=str(missing[0]),
                seen=f"{len(missing)} of them: {shown} (B is I and W)",
                fix=f"Add {missing[0]} to rank {rank}'s list.",
            )


def _check_pairs(schedule: Schedule) -> None:
    """Check that the receives of a rank from another stand in the order of the sends."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank in range(len(schedule.ranks)):
        for index, action in enumerate(schedule.actions(rank)):
            if action.kind.is_send:
                end = action.other_end
                sent[rank, schedule.placement[end.stage]].append(end)
            elif action.kind.is_recv:
                source = schedule.placement[action.other_end.stage]
                received[source, rank].append((index, action))
    for (source, rank), expected in sent.items():
        for wanted, (index, action) in zip_longest(expected, received[source, rank]):
            if wanted != action:
                raise ScheduleError(
                    "a rank receives in another order than is sent",
                    rank=rank,
                    index=index,
                    action=str(action),
                    seen=f"rank {source} sends {wanted.other_end} at this point",
                    fix=f"Put {wanted} here.",
                )
