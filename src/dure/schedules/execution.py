"""When each action of a schedule runs, if ranks wait only for data: the longest path to it.

Each rank does its list in order. A forward waits for the forward of the stage before it, a backward
(B or I) for the backward of the stage after it. If that stage is on another rank, its result
arrives `send_time` after it is sent: in a grid it is sent as soon as it is computed; in a list with
transfers when both SEND and RECV have been posted, which takes a rank the time that they are given.

The work is linear in the number of actions: a rank is advanced until it waits, and again when what
it waits for has a time.

*Deadlock.* With *unbuffered* (rendezvous) sends a transfer ends when both its ends have been
reached, its SEND by one rank and its RECV by the other, and only then does a rank continue. Each
SEND has one RECV, so nothing that a rank could do is taken away by what another does: if one order
    of
execution reaches the end, all do. So running the lists once is a proof. A list without deadlock
here has none with transfers that are posted together, nor with buffered sends, nor with sends that
no rank waits for: they only wait for less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dure.errors import ScheduleError
from dure.schedules.actions import Action, Kind, Schedule

__all__ = ["Execution", "Span", "execute", "prove_no_deadlock"]


class Span(NamedTuple):
    """An action and when it keeps its rank busy; SEND and RECV are posted at the end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class _Wait:
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
        order: (rank, action) of all computations, in order of their ends; a dependent action
            comes after its dependency, also if both end at once.
    """

    spans: list[list[Span]]
    order: list[tuple[int, Action]]


def execute(
    schedule: Schedule,
    time_of: Callable[[Action], float],
    send_time: Callable[[Action], float],
    *,
    unbuffered: bool = False,
) -> Execution:
    """Run a schedule whose lists are valid each.

    Args:
        schedule: A grid, or lists with transfers.
        time_of: The time that an action takes of its rank.
        send_time: The time from a SEND to its arrival.
        unbuffered: Ranks wait at both ends of a transfer, and for nothing else.

    Raises:
        ScheduleError: Ranks wait for each other; names the cycle.
    """
    run = _Run(schedule, time_of, send_time, unbuffered)
    awake = list(range(len(schedule.ranks)))
    while awake:
        awake += run.advance(awake.pop())
    waits = {rank: run.wait(rank) for rank in run.blocked.values()}
    if waits:
        _refuse(waits)
    run.ended.sort(key=lambda entry: entry[0])  # stable: dependencies stay in order
    return Execution(run.spans, [(rank, action) for _, rank, action in run.ended])


def prove_no_deadlock(schedule: Schedule) -> None:
    """Show that a valid schedule comes to its end, however fast each rank is.

    Of lists with transfers, even if each send waits for its receive; of a grid, that its ranks do
    not wait for each other's data.

    Raises:
        ScheduleError: It does not; `cycle` has the ranks that wait for each other.
    """
    execute(schedule, lambda _: 1.0, lambda _: 0.0, unbuffered=schedule.has_transfers)


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
        unbuffered: bool,
    ) -> None:
        ranks, m = len(schedule.ranks), schedule.microbatches
        self.placement, self.m, self.stages = schedule.placement, m, schedule.stages
        self.time_of, self.send_time = time_of, send_time
        self.lists = [schedule.actions(rank) for rank in range(ranks)]
        self.transfers, self.unbuffered = schedule.has_transfers, unbuffered
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
            start = self._start(rank, action, clock)
            if start is None:
                break
            clock = start + self.time_of(action)
            index += 1
            if action.kind.is_transfer:
                woken += self._post(action, clock)
            if self.unbuffered:
                continue
            if action.kind.is_compute:
                self.ended.append((clock, rank, action))
                woken += self._hand_over(action, clock)
            spans.append(Span(action, start, clock))
        self.at[rank], self.clock[rank] = index, clock
        return woken

    def _start(self, rank: int, action: Action, clock: float) -> float | None:
        """Return when an action can start; None if that is not known yet."""
        if self.unbuffered:
            if action.kind.is_transfer:
                number = self._number_of(action)
                if self.arrived[number] is None and number not in self.posted:
                    self.posted[number], self.blocked[number] = clock, rank
                    return None
            return clock
        for part in action.parts if action.kind.is_compute else ():
            if part.kind is Kind.BACKWARD_WEIGHT:
                continue
            number = self._number(part.stage, part.kind is Kind.FORWARD, part.microbatch)
            arrived = self.arrived[number]
            if arrived is None:
                self.blocked[number] = rank
                return None
            clock = max(clock, arrived)
        return clock

    def _number(self, stage: int, forward: bool, microbatch: int | None) -> int:
        """Return the number of what a stage's forward, or backward, waits for."""
        return stage * self.m + (microbatch or 0) + (0 if forward else self.backward)

    def _number_of(self, transfer: Action) -> int:
        stage, kind, microbatch, _ = transfer
        forward = kind is Kind.SEND_F or kind is Kind.RECV_F
        if kind.is_send:
            stage += 1 if forward else -1
        return self._number(stage, forward, microbatch)

    def _hand_over(self, action: Action, end: float) -> Iterator[int]:
        """Make an action's results known to their stage, if it need not be received."""
        for stage, kind, microbatch, _ in action.parts:
            forward = kind is Kind.FORWARD
            to = stage + 1 if forward else stage - 1
            if kind is Kind.BACKWARD_WEIGHT or not 0 <= to < self.stages:
                continue
            away = self.placement[to] != self.placement[stage]
            if away and self.transfers:
                continue
            send = Action(stage, Kind.SEND_F if forward else Kind.SEND_B, microbatch)
            time = self.send_time(send) if away else 0.0
            yield from self._arrive(self._number(to, forward, microbatch), end + time)

    def _post(self, action: Action, clock: float) -> Iterator[int]:
        """Reach one end of a transfer; at the second, it takes place."""
        number = self._number_of(action)
        if self.arrived[number] is not None:
            return
        other = self.posted.pop(number, None)
        if other is None:
            self.posted[number] = clock
        else:
            send = action if action.kind.is_send else action.other_end
            yield from self._arrive(number, max(other, clock) + self.send_time(send))

    def _arrive(self, number: int, time: float) -> Iterator[int]:
        self.arrived[number] = time
        rank = self.blocked.pop(number, None)
        if rank is not None:
            yield rank

    def wait(self, rank: int) -> _Wait:
        """Return what a blocked rank waits for."""
        action = self.lists[rank][self.at[rank]]
        if action.kind.is_transfer:
            awaited = action.other_end
        else:
            number = next(n for n, waiting in self.blocked.items() if waiting == rank)
            forward = number < self.backward
            stage, microbatch = divmod(number % self.backward, self.m)
            producer = stage - 1 if forward else stage + 1
            if self.transfers and self.placement[producer] != rank:
                kind = Kind.SEND_F if forward else Kind.SEND_B
            else:
                kind = Kind.FORWARD if forward else Kind.FULL_BACKWARD
            awaited = Action(producer, kind, microbatch)
        return _Wait(self.at[rank], action, awaited, self.placement[awaited.stage])


def _refuse(waits: dict[int, _Wait]) -> None:
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
        "ranks wait for each other forever",
        cycle=tuple((r, str(waits[r].action)) for r in path),
        seen=", ".join(steps),
        fix="Change the order of these actions on one of the ranks.",
    )
