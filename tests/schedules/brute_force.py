"""What the proof and the simulator find, in the slow and obvious way; and schedules by text."""

from __future__ import annotations

from collections.abc import Callable

from dure.schedules import Action, Kind, Schedule


def read(*ranks: str, microbatches: int = 1, placement: tuple[int, ...] = (0, 1)) -> Schedule:
    """Return a schedule of lists of actions in text form."""
    lists = tuple(tuple(map(Action.parse, rank.split())) for rank in ranks)
    return Schedule(lists, placement, microbatches)


def comes_to_its_end(schedule: Schedule) -> bool:
    """Run ranks with sends that block until they are received, round after round."""
    left = [schedule.actions(rank) for rank in range(len(schedule.ranks))]
    in_flight: list[list[Action]] = [[] for _ in left]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(left):
            while actions and not in_flight[rank]:
                moved = True
                if not actions[0].kind.is_transfer:
                    actions.pop(0)
                    continue
                in_flight[rank].append(actions.pop(0))
        for here in in_flight:
            for there in in_flight:
                for action in list(here):
                    if action in here and action.other_end in there:
                        here.remove(action)
                        there.remove(action.other_end)
                        moved = True
    return not any(left) and not any(in_flight)


def ends(
    schedule: Schedule, time_of: Callable[[Action], float], send_time: float
) -> list[list[float]]:
    """Return when each action ends: raise all times until nothing changes."""
    lists = [schedule.actions(rank) for rank in range(len(schedule.ranks))]
    done: dict[Action, float] = {}  # a part, or a transfer's end, -> when it is there
    found = [[0.0] * len(actions) for actions in lists]
    for _ in range(sum(map(len, lists)) + 2):
        before = [list(times) for times in found]
        for rank, actions in enumerate(lists):
            clock = 0.0
            for index, action in enumerate(actions):
                if action.kind.is_compute:
                    for part in action.parts:
                        clock = max(clock, arrival(schedule, part, done, send_time))
                clock += time_of(action)
                for part in action.parts:
                    done[part] = clock
                found[rank][index] = clock
        if found == before:
            return found
    raise AssertionError("times never settle")


def arrival(schedule: Schedule, part: Action, done: dict[Action, float], send_time: float) -> float:
    """Return when what `part` takes from a neighbouring stage is there."""
    stage, kind, microbatch, _ = part
    if kind is Kind.BACKWARD_WEIGHT:
        return 0.0
    forward = kind is Kind.FORWARD
    source = stage - 1 if forward else stage + 1
    if not 0 <= source < schedule.stages:
        return 0.0
    if schedule.placement[source] != schedule.placement[stage]:
        receive = Action(stage, Kind.RECV_F if forward else Kind.RECV_B, microbatch)
        if schedule.has_transfers:
            return max(done.get(receive, 0.0), done.get(receive.other_end, 0.0)) + send_time
    else:
        send_time = 0.0
    kinds = [Kind.FORWARD] if forward else [Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT]
    return max(done.get(Action(source, k, microbatch), 0.0) for k in kinds) + send_time
