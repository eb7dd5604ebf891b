"""Checks that a schedule is valid: each action once, on its rank, in a possible order.

Checks of each list alone: its actions are of stages on the rank; a forward comes before its
backward, and I before W; the inputs from a stage on the same rank have been computed; in lists with
transfers, the inputs from another rank have been received and each sent tensor has been computed;
no action is missing or occurs twice; a stage computes while it is unsharded.
Checks of each pair of ranks: the receives are in the order of the sends. Whether ranks wait for
each other is another question: see `prove_no_deadlock`.

Pipelines of 128 stages have millions of actions, so what each action needs is looked up in a table
of its stage and kind (`_Rule`), and what is noted for it is a bit.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from dure.errors import ScheduleError
from dure.schedules.actions import Action, Kind, Schedule

__all__ = ["needed_before", "peak_held", "validate"]

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
# What frees a microbatch's activations, of a stage.
_RELEASES = frozenset([Kind.FULL_BACKWARD, Kind.BACKWARD_WEIGHT])
_STEP = {Kind.SEND_F: 1, Kind.RECV_B: 1, Kind.SEND_B: -1, Kind.RECV_F: -1}


def needed_before(action: Action, placement: tuple[int, ...], transfers: bool) -> Iterator[Action]:
    """Give the actions that must come before an action in its rank's list.

    Args:
        action: It computes, sends or receives.
        placement: The rank of each stage.
        transfers: The list has SEND and RECV.
    """
    stage, kind, microbatch, _ = action
    if kind in _BEFORE:
        yield Action(stage, _BEFORE[kind], microbatch)
    if kind is Kind.FORWARD:
        source, computed, received = stage - 1, Kind.FORWARD, Kind.RECV_F
    elif kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT):
        source, computed, received = stage + 1, Kind.BACKWARD_INPUT, Kind.RECV_B
    else:
        return
    if not 0 <= source < len(placement):
        return
    if placement[source] == placement[stage]:
        yield Action(source, computed, microbatch)
    elif transfers:
        yield Action(stage, received, microbatch)


def validate(schedule: Schedule) -> tuple[int, ...]:
    """Check a grid, or lists with transfers, and return each rank's peak of live activations.

    An activation is live from its forward to its B or W; without backwards, during its forward.

    Args:
        schedule: A grid, or lists with transfers.

    Returns:
        For each rank the most activations that are live at a time.

    Raises:
        ScheduleError: It is not valid; names rank, index and action, if there is one.

    Example:
        ```python
        from dure import schedules

        assert schedules.validate(schedules.gpipe((0, 1), microbatches=4)) == (4, 4)
        assert schedules.validate(schedules.one_f_one_b((0, 1), microbatches=4)) == (2, 1)
        ```
    """
    ranks = len(schedule.ranks)
    if schedule.microbatches < 1 or not ranks or set(schedule.placement) != {*range(ranks)}:
        raise ScheduleError(
            "a schedule has at least one microbatch, and at least one stage on each rank",
            seen=f"{schedule.microbatches} microbatches, {ranks} ranks, and stages on the ranks "
            f"{schedule.placement}",
            fix="Give one list for each rank of the placement.",
        )
    check = _Check(schedule)
    for rank in range(ranks):
        check.rank(rank)
    check.nothing_missing()
    if schedule.has_transfers:
        _check_pairs(schedule)
    return tuple(int(peak_held(schedule.actions(rank), 1)) for rank in range(ranks))


def peak_held(actions: Sequence[Action], size: float | Sequence[float]) -> float:
    """Return the most that a rank holds for backward, if a microbatch of a stage takes `size`."""
    held = peak = 0.0
    trains = any(kind in _RELEASES for _, kind, _ in _parts(actions))
    for stage, kind, _ in _parts(actions):
        if kind is Kind.FORWARD:
            each = size if isinstance(size, int | float) else size[stage]
            peak = max(peak, held + each)
            held += each if trains else 0
        elif kind in _RELEASES:
            held -= size if isinstance(size, int | float) else size[stage]
    return peak


def _parts(actions: Iterable[Action]) -> Iterator[tuple[int, Kind, int | None]]:
    """Give stage, kind and microbatch of the parts of all actions."""
    for stage, kind, microbatch, parts in actions:
        if parts is None:
            yield stage, kind, microbatch
        else:
            yield from (part[:3] for part in parts)


class _Rule(NamedTuple):
    """What an action of one kind and stage needs, for its microbatch, and what it adds: bits.

    Args:
        adds: The bits that it sets.
        own: The bits that its stage must have.
        other: The bits that a neighboring stage on the same rank must have.
        distance: The place of the neighbor's bits, counted from its own.
    """

    adds: int
    own: int
    other: int
    distance: int


class _Check:
    """What has been done so far, over all ranks."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.m = schedule, schedule.microbatches
        self.transfers = schedule.has_transfers
        self.done = bytearray(schedule.stages * self.m)
        backwards = {*_RELEASES, Kind.BACKWARD_INPUT, Kind.SEND_B, Kind.RECV_B}
        lists = ((a for a in rank if a is not None) for rank in schedule.ranks)
        self.trains = any(kind in backwards for rank in lists for _, kind, _ in _parts(rank))
        self.rules: list[dict[tuple[int, Kind], _Rule]] = [{} for _ in schedule.ranks]
        for stage, rank in enumerate(schedule.placement):
            for kind in Kind:
                if (rule := self._rule(stage, kind)) is not None:
                    self.rules[rank][stage, kind] = rule
        self.weights = [0] * schedule.stages  # microbatches whose weights' gradients are computed
        self.gathered: set[int] = set()  # stages that are unsharded
        self.reduced: set[int] = set()

    def rank(self, rank: int) -> None:
        """Check a rank's list by itself."""
        actions = self.schedule.actions(rank)
        done, m, rules = self.done, self.m, self.rules[rank]
        sharded = {a.stage for a in actions if a.kind is Kind.UNSHARD}
        for index, action in enumerate(actions):
            try:
                for part in action.sub_actions or (action,):
                    stage, kind, microbatch, _ = part
                    rule = rules.get((stage, kind))
                    if rule is None or microbatch is None or not 0 <= microbatch < m:
                        self._without_rule(rank, part)
                        continue
                    if sharded and kind.is_compute and stage in sharded - self.gathered:
                        _refuse_early(part, Action(stage, Kind.UNSHARD))
                    adds, own, other, distance = rule
                    at = stage * m + microbatch
                    had = done[at]
                    if had & adds or had & own != own or done[at + distance] & other != other:
                        self._refuse(part)
                    done[at] = had | adds
                    if kind in _RELEASES:
                        self.weights[stage] += 1
            except ScheduleError as error:
                raise ScheduleError(
                    error.what,
                    rank=rank,
                    index=index,
                    action=str(action),
                    seen=error.seen,
                    fix=error.fix,
                ) from None

    def _rule(self, stage: int, kind: Kind) -> _Rule | None:
        """Return the rule of a stage's actions of a kind; None if there are none."""
        placement = self.schedule.placement
        if kind not in _DONE or (kind.is_transfer and not _goes_away(stage, kind, placement)):
            return None
        own = other = distance = 0
        for needed in needed_before(Action(stage, kind, 0), placement, self.transfers):
            if needed.stage == stage:
                own |= _DONE[needed.kind]
            else:
                other, distance = _DONE[needed.kind], (needed.stage - stage) * self.m
        return _Rule(_DONE[kind], own, other, distance)

    def _without_rule(self, rank: int, action: Action) -> None:
        """Check and note an action of a complete stage; refuse any other."""
        self._on_rank(rank, action)
        if action.kind.of_stage:
            self._whole_stage(action)
        else:
            self._refuse(action)

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
                "a rank has an action of a stage that is placed on another rank",
                seen=f"stage {action.stage} is placed on rank {where}",
                fix=f"Move it to rank {where}'s list, or place the stage on rank {rank}.",
            )

    def _refuse(self, action: Action) -> NoReturn:
        """Raise for an action that cannot be done now: name the reason."""
        stage, kind, microbatch, _ = action
        placement = self.schedule.placement
        if self.done[stage * self.m + (microbatch or 0)] & _DONE[kind]:
            raise ScheduleError(
                "an action occurs twice",
                seen=f"{action}, or a part of it, occurs earlier",
                fix="Drop one of them; B is I and W in one.",
            )
        for needed in needed_before(action, placement, self.transfers):
            if not self.done[needed.stage * self.m + (microbatch or 0)] & _DONE[needed.kind]:
                _refuse_early(action, needed)
        raise ScheduleError(
            "a transfer has no other rank to go to, or to come from",
            seen=f"{action} with {len(placement)} stages, placed on ranks {placement}",
            fix="Drop it: stages on one rank hand over by themselves.",
        )

    def _whole_stage(self, action: Action) -> None:
        """Check and note an action that has no microbatch."""
        kind, stage = action.kind, action.stage
        is_gathered, done = stage in self.gathered, self.weights[stage]
        if kind is Kind.REDUCE_GRAD:
            wrong = stage in self.reduced or done < self.m
        else:
            wrong = is_gathered == (kind is Kind.UNSHARD)
        if wrong:
            raise ScheduleError(
                "UNSHARD and RESHARD alternate, and REDUCE_GRAD comes once, behind all backwards",
                seen=f"{action} of a stage that is {'un' if is_gathered else ''}sharded, "
                f"{done} of {self.m} backwards done",
                fix=f"Drop {action}, or move it.",
            )
        if kind is Kind.REDUCE_GRAD:
            self.reduced.add(stage)
        else:
            self.gathered ^= {stage}

    def nothing_missing(self) -> None:
        """Check that all has been done."""
        placement, missing = self.schedule.placement, list[Action]()
        for stage in range(len(placement)):
            kinds = [Kind.FORWARD]
            if self.trains:
                kinds += [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]
            if self.transfers:
                kinds += [
                    kind
                    for kind in _STEP
                    if _goes_away(stage, kind, placement)
                    if self.trains or kind in (Kind.SEND_F, Kind.RECV_F)
                ]
            complete = sum(_DONE[kind] for kind in kinds)
            for m in range(self.m):
                done = self.done[stage * self.m + m]
                if done != complete:
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


def _refuse_early(action: Action, needed: Action) -> NoReturn:
    raise ScheduleError(
        "an action comes before one that it needs",
        seen=f"{action} needs {needed}",
        fix=f"Put {needed} before it.",
    )


def _goes_away(stage: int, kind: Kind, placement: tuple[int, ...]) -> bool:
    """Tell whether a transfer has another rank at its other end."""
    other = stage + _STEP[kind]
    return 0 <= other < len(placement) and placement[other] != placement[stage]


def _check_pairs(schedule: Schedule) -> None:
    """Check that the receives of a rank from another are in the order of the sends.

    Both ends of a transfer have the same number: (stage * microbatches + microbatch) * 2 of the
    receiver, and 1 more for a gradient.
    """
    placement, m = schedule.placement, schedule.microbatches
    sent: dict[tuple[int, int], array[int]] = defaultdict(lambda: array("q"))
    received: dict[tuple[int, int], array[int]] = defaultdict(lambda: array("q"))
    for rank in range(len(schedule.ranks)):
        for stage, kind, microbatch, _ in schedule.actions(rank):
            step = _STEP.get(kind)
            if step is None:
                continue
            number = (microbatch or 0) * 2 + (kind is Kind.SEND_B or kind is Kind.RECV_B)
            if kind.is_send:
                sent[rank, placement[stage + step]].append(number + (stage + step) * m * 2)
            else:
                received[placement[stage + step], rank].append(number + stage * m * 2)
    for (source, rank), expected in sent.items():
        found = received[source, rank]
        if found != expected:
            place = next(
                i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]
            )
            at, is_gradient = divmod(expected[place], 2)
            stage, microbatch = divmod(at, m)
            wanted = Action(stage, Kind.RECV_B if is_gradient else Kind.RECV_F, microbatch)
            _refuse_order(schedule, source, rank, place, wanted)


def _refuse_order(
    schedule: Schedule, source: int, rank: int, place: int, wanted: Action
) -> NoReturn:
    """Raise for the receive of `rank` from `source` at a place among these: another is wanted."""
    receives = [
        (index, action)
        for index, action in enumerate(schedule.actions(rank))
        if action.kind.is_recv and schedule.placement[action.other_end.stage] == source
    ]
    index, action = receives[place]
    raise ScheduleError(
        "a rank receives in another order than is sent",
        rank=rank,
        index=index,
        action=str(action),
        seen=f"rank {source} sends {wanted.other_end} at this point",
        fix=f"Put {wanted} here.",
    )
