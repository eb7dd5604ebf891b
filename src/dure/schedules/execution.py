"""When each action of a schedule runs, if ranks wait only for data: the longest path to it.

Each rank does its list in order. A forward waits for the forward of the stage before it, a backward
(B or I) for the backward of the stage behind it. Where that stage lies on another rank, its result
arrives `send_time` after it is sent: in a grid it is sent as soon as it is there; in a list with
transfers when both SEND and RECV have been posted, which takes a rank the time that they are given.

The work is linear in the number of actions: a rank is advanced until it waits, and again when what
it waits for has a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dure.errors import ScheduleError
from dure.schedules.actions import Action, Kind, Schedule

__all__ = ["Execution", "Span", "Wait", "execute", "refuse_waiting"]


class Span(NamedTuple):
    """An action and when it keeps its rank busy; SEND and RECV are posted at the end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Where a rank stands still, and for which action of which rank."""

    index: int
    action: Action
    awaited: Action
    awaited_rank: int


@dataclass(frozen=True, slots=True)
class Execution:
    """What was run.

    Args:
        spans: For each rank its actions with their times, in order.
        order: (rank, action) of everything that computes, in order of its end; what depends on
            another stands behind it, also where both end at once.
    """

    spans: list[list[Span]]
    order: list[tuple[int, Action]]


def execute(
    schedule: Schedule,
    time_of: Callable[[Action], float],
    send_time: Callable[[Action], float],
) -> Execution:
    """Run a schedule whose lists are valid each.

    Args:
        schedule: A grid, or lists with transfers.
        time_of: The time that an action takes of its rank.
        send_time: The time from a SEND to its arrival.

    Raises:
        ScheduleError: Ranks wait for each other; names the cycle.
    """
    run = _Run(schedule, time_of, send_time)
    awake = list(range(len(schedule.ranks)))
    while awake:
        awake += run.advance(awake.pop())
    waits = {rank: run.wait(rank) for rank in run.blocked.values()}
    if waits:
        refuse_waiting(waits)
    run.ended.sort(key=lambda entry: entry[0])  # stable: dependencies stay in order
    return Execution(run.spans, [(rank, action) for _, rank, action in run.ended])


class _Run:
    """The state of `execute`.

    What is waited for has a number: stage * microbatches + microbatch for the input of a forward,
    and as much again behind all of those for the gradient that a backward needs.
    """

    def __init__(
        self,
        schedule: Schedule,
        time_of: Callable[[Action], float],
        send_time: Callable[[Action], float],
    ) -> None:
        ranks, m = len(schedule.ranks), schedule.microbatches
        self.placement, self.m, self.stages = schedule.placement, m, schedule.stages
        self.time_of, self.send_time = time_of, send_time
        self.lists = [schedule.actions(rank) for rank in range(ranks)]
        self.transfers = schedule.has_transfers
        self.backward = self.stages * m  # number of the first gradient
        self.arrived: list[float | None] = [None] * (2 * self.backward)
        self.arrived[:m] = [0.0] * m
        self.arrived[-m:] = [0.0] * m  # the last stage's backward starts from the loss
        self.posted: dict[int, float] = {}  # transfers of which one end has been reached
        self.blocked: dict[int, int] = {}  # number -> the rank that waits for it
        self.at = [0] * ranks
        self.clock = [0.0] * ranks
        self.spans: list[list[Span]] = [[] for _ in range(ranks)]
        self.ended: list[tuple[float, int, Action]] = []

    def advance(self, rank: int) -> list[int]:
        """Run a rank until it waits or ends; return the ranks that no longer wait."""
        woken: list[int] = []
        actions, spans, clock = self.lists[rank], self.spans[rank], self.clock[rank]
        index = self.at[rank]
        while index < len(actions):
            action = actions[index]
            if action.kind.is_compute:
                start = self._start(rank, action, clock)
                if start is None:
                    break
                clock = start + self.time_of(action)
                self.ended.append((clock, rank, action))
                woken += self._hand_over(action, clock)
            else:
                start = clock
                clock += self.time_of(action)
                if action.kind.is_transfer:
                    woken += self._post(action, clock)
            spans.append(Span(action, start, clock))
            index += 1
        self.at[rank], self.clock[rank] = index, clock
        return woken

    def _start(self, rank: int, action: Action, clock: float) -> float | None:
        for part in action.parts:
            if part.kind is Kind.BACKWARD_WEIGHT:
                continue
            number = part.stage * self.m + (part.microbatch or 0)
            number += 0 if part.kind is Kind.FORWARD else self.backward
            arrived = self.arrived[number]
            if arrived is None:
                self.blocked[number] = rank
                return None
            clock = max(clock, arrived)
        return clock

    def _hand_over(self, action: Action, end: float) -> Iterator[int]:
        """Make an action's results known to their stage, if it need not be received."""
        for stage, kind, microbatch, _ in action.parts:
            if kind is Kind.FORWARD:
                to, send, first = stage + 1, Kind.SEND_F, 0
            elif kind is Kind.BACKWARD_WEIGHT:
                continue
            else:
                to, send, first = stage - 1, Kind.SEND_B, self.backward
            if not 0 <= to < self.stages:
                continue
            away = self.placement[to] != self.placement[stage]
            if away and self.transfers:
                continue
            time = self.send_time(Action(stage, send, microbatch)) if away else 0.0
            yield from self._arrive(first + to * self.m + (microbatch or 0), end + time)

    def _post(self, action: Action, clock: float) -> Iterator[int]:
        """Reach one end of a transfer; at the second, it takes place."""
        send, receive = action, action.other_end
        if action.kind.is_recv:
            send, receive = receive, send
        number = receive.stage * self.m + (receive.microbatch or 0)
        number += 0 if receive.kind is Kind.RECV_F else self.backward
        other = self.posted.pop(number, None)
        if other is None:
            self.posted[number] = clock
        else:
            yield from self._arrive(number, max(other, clock) + self.send_time(send))

    def _arrive(self, number: int, time: float) -> Iterator[int]:
        self.arrived[number] = time
        rank = self.blocked.pop(number, None)
        if rank is not None:
            yield rank

    def wait(self, rank: int) -> Wait:
        """Return what a blocked rank waits for."""
        number = next(n for n, waiting in self.blocked.items() if waiting == rank)
        forward = number < self.backward
        stage, microbatch = divmod(number % self.backward, self.m)
        producer = stage - 1 if forward else stage + 1
        if self.transfers and self.placement[producer] != rank:
            kind = Kind.SEND_F if forward else Kind.SEND_B
        else:
            kind = Kind.FORWARD if forward else Kind.FULL_BACKWARD
        index = self.at[rank]
        awaited = Action(producer, kind, microbatch)
        return Wait(index, self.lists[rank][index], awaited, self.placement[producer])


def refuse_waiting(waits: dict[int, Wait]) -> None:
    """Raise for ranks that stand still: name the cycle, or who waits for what never comes.

    Args:
        waits: For each rank that stands still, where.

    Raises:
        ScheduleError: Always.
    """
    path: list[int] = []
    rank = next(iter(waits))
    while rank in waits and rank not in path:
        path.append(rank)
        rank = waits[rank].awaited_rank
    if rank not in waits:
        wait = waits[path[-1]]
        raise ScheduleError(
            "a rank waits for what never comes",
            rank=path[-1],
            index=wait.index,
            action=str(wait.action),
            seen=f"rank {rank} ends without {wait.awaited}",
            fix=f"Add {wait.awaited} to rank {rank}'s list.",
        )
    path = path[path.index(rank) :]
    lowest = path.index(min(path))
    path = path[lowest:] + path[:lowest]
    steps = [
        f"rank {r} at {waits[r].action} (index {waits[r].index}) waits for {waits[r].awaited} "
        f"of rank {waits[r].awaited_rank}"
        for r in path
    ]
    raise ScheduleError(
        "ranks wait for each other for ever",
        cycle=tuple((r, str(waits[r].action)) for r in path),
        seen=", ".join(steps),
        fix="Change the order of these actions on one of the ranks.",
    )
