"""A check for backends that match the messages of two ranks by their order, as NCCL does.

Such a backend ignores tags. So a rank must post its receives from another rank in the order in
which that one sends, else it would compute with the values of another microbatch. Messages whose
shapes are not known yet are received when they are used, so that order must be the same, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dure.errors import UsageError
from dure.schedules import Action, Kind, Schedule

__all__ = ["check_launch_order"]


def check_launch_order(schedule: Schedule, op: str, device_types: Collection[str]) -> None:
    """Check all ranks, so that all find the same.

    Args:
        schedule: With its sends and receives.
        op: The class of the schedule, for the error.
        device_types: Those of the group.

    Raises:
        UsageError: A rank receives in another order than its peer sends; or the group takes no CPU
            tensors, so that headers, which are received ahead, would change the order.
    """
    if "cpu" not in device_types:
        raise UsageError(
            "a pipeline over a backend that matches messages by their order needs one for CPU "
            "tensors beside it",
            op=op,
            seen=f"the group takes tensors on {', '.join(sorted(device_types))}",
            fix="Name both, as in 'cpu:shm,cuda:nccl', or no backend.",
        )
    ranks = range(len(schedule.ranks))
    actions = {rank: [p for a in schedule.actions(rank) for p in a.parts] for rank in ranks}
    for receiver in ranks:
        posted = [a.other_end for a in actions[receiver] if a.kind in (Kind.RECV_F, Kind.RECV_B)]
        used = _used(actions[receiver])
        for sender in ranks:
            sent = [
                a
                for a in actions[sender]
                if a.kind in (Kind.SEND_F, Kind.SEND_B)
                and schedule.placement[a.other_end.stage] == receiver
            ]
            known = {*sent}
            for received in (posted, used):
                if [a for a in received if a in known] != sent:
                    raise UsageError(
                        "this schedule receives messages in another order than they are sent, and "
                        "the backend matches them by their order",
                        op=op,
                        seen=f"messages of rank {sender} to rank {receiver}",
                        fix="Use another schedule, such as Schedule1F1B, or a backend that matches "
                        "messages by tags: 'cpu:shm,cuda:shm' on one host.",
                    )


def _used(actions: Iterable[Action]) -> list[Action]:
    """Return the sends, in the order in which the computations of a rank use the messages."""
    found: list[Action] = []
    for action in actions:
        if action.kind is Kind.FORWARD:
            found.append(Action(action.stage - 1, Kind.SEND_F, action.microbatch))
        elif action.kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT):
            found.append(Action(action.stage + 1, Kind.SEND_B, action.microbatch))
    return found
