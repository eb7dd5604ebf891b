"""From a grid to what ranks execute: transfers, and FSDP's actions for complete stages.

*Where transfers stand.* The grid is run in thought, with typical times, and the ends of its actions
are put into one order over all ranks. Behind each end come the transfers of its result: the SEND
on its rank, and the RECV on the other. So a SEND stands right behind what it sends, and a RECV
before whatever that rank is computing at that moment: it has been posted when the data comes, and
no earlier than needed, as pending receives hold up other communication on some devices.

Each rank's list is a part of one common order, in which both ends of a transfer are neighbours. So
it cannot deadlock, even if each send blocks until its receive is reached.

*Deferred receives* move each RECV back, past computation, to what needs it, but not past another
transfer: computation in between runs without it, so this is as safe, but the transfer hides behind
    less.

*Whole stages.* A stage is unsharded once, one action before its first, and resharded once, behind
its last: its parameters are gathered once a step and not once a microbatch. REDUCE_GRAD stands
behind a stage's last B or W, and what that sends.
"""

from __future__ import annotations

from collections.abc import Collection

from dure.errors import ScheduleError
from dure.schedules.actions import Action, Kind, Schedule
from dure.schedules.execution import execute
from dure.schedules.simulate import DEFAULT_TIMES, cost_function
from dure.schedules.validate import needed_before, validate

__all__ = ["lower"]

# Typical, for a forward of 1. Not 0: a rank would seem to be done just when its next input comes,
# and receive it behind what it still computes when it does come.
_SEND_TIME = 0.2


def lower(
    schedule: Schedule, *, sharded: Collection[int] = (), defer_receives: bool = False
) -> Schedule:
    """Return a grid's lists with transfers, UNSHARD, RESHARD and REDUCE_GRAD in them.

    Args:
        schedule: A grid.
        sharded: Stages that are fully sharded: these are unsharded and resharded.
        defer_receives: Receive as late as is safe.

    Returns:
        Lists with transfers, one per rank.

    Raises:
        ScheduleError: It has transfers already, is not valid, or its ranks wait for each other.

    Example:
        ```python
        from dure import schedules

        lists = schedules.lower(schedules.gpipe((0, 1), microbatches=1))
        assert [str(action) for action in lists.ranks[0]][:2] == ["0F0", "0SEND_F0"]
        ```
    """
    if schedule.has_transfers:
        raise ScheduleError(
            "the schedule has transfers already",
            seen=f"schedule {schedule.name!r}",
            fix="Execute it as it is, or drop its SEND and RECV.",
        )
    validate(schedule)
    run = execute(schedule, cost_function(DEFAULT_TIMES), _SEND_TIME)
    lists: list[list[Action]] = [[] for _ in schedule.ranks]
    computations = [
        (a for a in schedule.actions(r) if a.kind.is_compute) for r in range(len(lists))
    ]
    for rank in run.order():
        action = next(computations[rank])
        lists[rank].append(action)
        for part in action.parts:
            send = _send_of(part, schedule.placement)
            if send is not None:
                lists[rank].append(send)
                lists[schedule.placement[send.other_end.stage]].append(send.other_end)
    if defer_receives:
        lists = [_defer(actions, schedule.placement) for actions in lists]
    return schedule.with_ranks([_whole_stages(actions, sharded) for actions in lists])


def _send_of(action: Action, placement: tuple[int, ...]) -> Action | None:
    """Return the send of an action's result to another rank, if it needs one."""
    stage, kind, microbatch, _ = action
    if kind is Kind.BACKWARD_WEIGHT:
        return None
    to, send = (stage + 1, Kind.SEND_F) if kind is Kind.FORWARD else (stage - 1, Kind.SEND_B)
    if not 0 <= to < len(placement) or placement[to] == placement[stage]:
        return None
    return Action(stage, send, microbatch)


def _defer(actions: list[Action], placement: tuple[int, ...]) -> list[Action]:
    """Move receives back to what needs them, or to the next transfer."""
    found: list[Action] = []
    held: list[Action] = []
    for action in actions:
        needs = {n for part in action.parts for n in needed_before(part, placement, True)}
        if action.kind.is_recv:
            found += held
            held = [action]
        elif action.kind.is_send or needs & set(held):
            found += [*held, action]
            held = []
        else:
            found.append(action)
    return found + held


def _whole_stages(actions: list[Action], sharded: Collection[int]) -> list[Action]:
    """Add what is done once for a stage."""
    computed = [(i, part) for i, a in enumerate(actions) if a.kind.is_compute for part in a.parts]
    ahead: dict[int, int] = {}  # stage -> where it is unsharded: an action before its first
    last: dict[int, int] = {}
    reduced: dict[int, int] = {}
    for position, (index, part) in enumerate(computed):
        ahead.setdefault(part.stage, computed[position - 1][0] if position else 0)
        last[part.stage] = index
        if part.kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_WEIGHT):
            reduced[part.stage] = index
    found: list[Action] = []
    behind: list[Action] = []  # of what was computed last: others wait for what it sends
    for index, action in enumerate(actions):
        if not action.kind.is_send:
            found += behind
            behind = []
        found += [Action(s, Kind.UNSHARD) for s in ahead if ahead[s] == index and s in sharded]
        found.append(action)
        if action.kind.is_compute:
            for stage in {part.stage: None for part in action.parts}:
                if reduced.get(stage) == index:
                    behind.append(Action(stage, Kind.REDUCE_GRAD))
                if last[stage] == index and stage in sharded:
                    behind.append(Action(stage, Kind.RESHARD))
    return found + behind
