"""When each action of a schedule runs, if ranks wait only for data: the longest path to it.

Each rank does its list in order. A forward waits for the forward of the stage before it, a backward
(B or I) for the backward of the stage after it. If that stage is on another rank, its result
arrives `send_time` after it is sent: in a grid it is sent as soon as it is computed; in a list with
transfers when both SEND and RECV have been posted, which takes a rank the time that they are given.

The work is linear in the number of actions: a rank is advanced until it waits, and again when what
it waits for has a time. Pipelines of 128 stages have millions of actions, so what is noted for each
of them is a number: Python's garbage collector would visit objects again and again.

*Numbers.* What is waited for has a number: stage * microbatches + microbatch for the input of a
forward, and as much again behind all of those for the gradient that a backward needs. Whatever
waits for it, sends it or receives it is a fixed distance from it, one for each kind of action.

*Deadlock.* With *unbuffered* (rendezvous) sends a transfer ends when both its ends have been
reached, its SEND by one rank and its RECV by the other, and only then does a rank continue. Each
SEND has one RECV, so nothing that a rank could do is taken away by what another does: if one order
of execution reaches the end, all do. So running the lists once is a proof. A list without deadlock
here has none with transfers that are posted together, nor with buffered sends, nor with sends that
no rank waits for: they only wait for less.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from dure.errors import ScheduleError
from dure.schedules.actions import Action, Kind, Schedule

__all__ = ["Execution", "Span", "Spans", "execute", "prove_no_deadlock"]

# A computation's result is sent so.
_SENT_BY = {
    Kind.FORWARD: Kind.SEND_F,
    Kind.FULL_BACKWARD: Kind.SEND_B,
    Kind.BACKWARD_INPUT: Kind.SEND_B,
}


class Span(NamedTuple):
    """An action and when it keeps its rank busy; SEND and RECV are posted at the end.

    Obtained from:
        `Simulation.spans`.
    """

    action: Action
    start: float
    end: float


class Spans(Sequence[Span]):
    """A rank's actions with their times, in order; each `Span` is made when it is read.

    Args:
        actions: The actions.
        starts: When each of them starts.
        ends: When each of them ends.

    Example:
        ```python
        from dure.schedules import make_schedule, simulate

        first = simulate(make_schedule("1f1b", stages=2, microbatches=4, ranks=2)).spans[0]
        assert (str(first[1].action), first[1].start, first[1].end) == ("0F1", 1.0, 2.0)
        ```
    """

    __slots__ = ("_actions", "_ends", "_starts")

    def __init__(
        self, actions: Sequence[Action], starts: Iterable[float], ends: Iterable[float]
    ) -> None:
        self._actions, self._starts, self._ends = actions, array("d", starts), array("d", ends)

    def __len__(self) -> int:
        return len(self._actions)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> Spans: ...
    def __getitem__(self, index: int | slice) -> Span | Spans:
        if isinstance(index, slice):
            return Spans(self._actions[index], self._starts[index], self._ends[index])
        return Span(self._actions[index], self._starts[index], self._ends[index])

    def __iter__(self) -> Iterator[Span]:
        return map(Span, self._actions, self._starts, self._ends)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Spans):
            return NotImplemented
        mine, theirs = (self._starts, self._ends), (other._starts, other._ends)
        return mine == theirs and [*self._actions] == [*other._actions]

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr([*self])

    @property
    def busy_time(self) -> float:
        """How long the rank is busy."""
        return sum(end - start for start, end in zip(self._starts, self._ends, strict=True))


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
        computed: The rank of each computation, in the order in which they were run.
        computed_ends: Their ends.
    """

    spans: list[Spans]
    computed: Sequence[int]
    computed_ends: Sequence[float]

    def order(self) -> Iterator[int]:
        """Give the rank of each computation, in order of their ends.

        A dependent computation comes after its dependency, also if both end at once. Those of a
        rank are in the order of its list.
        """
        by_end = sorted(range(len(self.computed)), key=self.computed_ends.__getitem__)  # stable
        return map(self.computed.__getitem__, by_end)


def execute(
    schedule: Schedule,
    time_of: Callable[[Action], float],
    send_time: float | Callable[[Action], float],
) -> Execution:
    """Run a schedule whose lists are valid each.

    Args:
        schedule: A grid, or lists with transfers.
        time_of: The time that an action takes of its rank.
        send_time: The time from a SEND to its arrival, or a function of the SEND.

    Raises:
        ScheduleError: Ranks wait for each other; names the cycle.
    """
    run = _WithTimes(schedule, time_of, send_time)
    run.to_the_end()
    spans = map(Spans, run.lists, run.starts, run.ends)
    return Execution([*spans], run.computed, run.computed_ends)


def prove_no_deadlock(schedule: Schedule) -> None:
    """Show that a valid schedule comes to its end, however fast each rank is.

    Of lists with transfers, even if each send waits for its receive; of a grid, that its ranks do
    not wait for each other's data.

    Args:
        schedule: A valid grid, or lists with transfers.

    Raises:
        ScheduleError: It does not; `cycle` has the ranks that wait for each other.

    Example:
        ```python
        from dure import schedules

        schedules.prove_no_deadlock(schedules.one_f_one_b((0, 1), microbatches=4))
        ```
    """
    buffered = not schedule.has_transfers
    run = _WithTimes(schedule, lambda _: 1.0, 0.0) if buffered else _Unbuffered(schedule)
    run.to_the_end()


class _Run:
    """What both ways to run a schedule share.

    Attributes:
        lists: For each rank its actions.
        gradients: The number of the first gradient.
        distances: For each kind of action the distance from stage * microbatches + microbatch to
            the number of what it needs or transfers; W needs nothing of another stage.
        blocked: For each number that is waited for, the rank that waits.
    """

    def __init__(self, schedule: Schedule) -> None:
        m = schedule.microbatches
        self.placement, self.m, self.stages = schedule.placement, m, schedule.stages
        self.lists = [schedule.actions(rank) for rank in range(len(schedule.ranks))]
        self.gradients = self.stages * m
        self.distances = {
            Kind.FORWARD: 0,
            Kind.RECV_F: 0,
            Kind.SEND_F: m,
            Kind.FULL_BACKWARD: self.gradients,
            Kind.BACKWARD_INPUT: self.gradients,
            Kind.RECV_B: self.gradients,
            Kind.SEND_B: self.gradients - m,
        }
        self.blocked: dict[int, int] = {}

    def to_the_end(self) -> None:
        """Run all ranks.

        Raises:
            ScheduleError: Ranks wait for each other; names the cycle.
        """
        awake = list(range(len(self.lists)))
        while awake:
            awake += self.advance(awake.pop())
        waits = {rank: self.wait(rank) for rank in self.blocked.values()}
        if waits:
            _refuse(waits)

    def advance(self, rank: int) -> list[int]:
        """Run a rank until it waits or ends; return the ranks that no longer wait."""
        raise NotImplementedError

    def wait(self, rank: int) -> _Wait:
        """Return what a blocked rank waits for."""
        raise NotImplementedError


class _Unbuffered(_Run):
    """Ranks wait at both ends of a transfer, and for nothing else."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.at = [0] * len(self.lists)

    def advance(self, rank: int) -> list[int]:
        woken: list[int] = []
        actions, distances, blocked, m = self.lists[rank], self.distances, self.blocked, self.m
        for index in range(self.at[rank], len(actions)):
            stage, kind, microbatch, _ = actions[index]
            if not kind.is_transfer:
                continue
            number = distances[kind] + stage * m + (microbatch or 0)
            other = blocked.pop(number, None)
            if other is None:
                self.at[rank], blocked[number] = index, rank
                return woken
            self.at[other] += 1
            woken.append(other)
        self.at[rank] = len(actions)
        return woken

    def wait(self, rank: int) -> _Wait:
        action = self.lists[rank][self.at[rank]]
        awaited = action.other_end
        return _Wait(self.at[rank], action, awaited, self.placement[awaited.stage])


class _WithTimes(_Run):
    """Ranks wait for data.

    Attributes:
        arrived: For each number when it arrived; None if it has not.
        posted: Transfers of which one end has been reached, and when.
        starts: For each rank when its actions start, as far as it is known.
        ends: The same of their ends.
        computed: The rank of each computation, in the order in which they were run.
        computed_ends: Their ends.
    """

    def __init__(
        self,
        schedule: Schedule,
        time_of: Callable[[Action], float],
        send_time: float | Callable[[Action], float],
    ) -> None:
        super().__init__(schedule)
        self.time_of, self.send_time = time_of, send_time
        self.transfers = schedule.has_transfers
        self.arrived: list[float | None] = [None] * (2 * self.gradients)
        self.arrived[: self.m] = [0.0] * self.m
        self.arrived[-self.m :] = [0.0] * self.m  # the last stage's backward starts from the loss
        self.posted: dict[int, float] = {}
        self.starts = [array("d") for _ in self.lists]
        self.ends = [array("d") for _ in self.lists]
        self.computed, self.computed_ends = array("l"), array("d")

    def advance(self, rank: int) -> list[int]:
        woken: list[int] = []
        actions, starts, ends = self.lists[rank], self.starts[rank], self.ends[rank]
        time_of = self.time_of
        clock = ends[-1] if ends else 0.0
        for index in range(len(ends), len(actions)):
            action = actions[index]
            kind = action[1]
            start = self._start(rank, action, clock) if kind.is_compute else clock
            if start is None:
                break
            clock = start + time_of(action)
            starts.append(start)
            ends.append(clock)
            if kind.is_compute:
                self.computed.append(rank)
                self.computed_ends.append(clock)
                self._hand_over(action, clock, woken)
            elif kind.is_transfer:
                self._post(action, clock, woken)
        return woken

    def _start(self, rank: int, action: Action, clock: float) -> float | None:
        """Return when a computation can start; None if that is not known yet."""
        for stage, kind, microbatch, _ in action.sub_actions or (action,):
            if kind is Kind.BACKWARD_WEIGHT:
                continue
            number = self.distances[kind] + stage * self.m + (microbatch or 0)
            arrived = self.arrived[number]
            if arrived is None:
                self.blocked[number] = rank
                return None
            clock = max(clock, arrived)
        return clock

    def _hand_over(self, action: Action, end: float, woken: list[int]) -> None:
        """Make an action's results known to their stage, if it need not be received."""
        for stage, kind, microbatch, _ in action.sub_actions or (action,):
            to = stage + 1 if kind is Kind.FORWARD else stage - 1
            if kind is Kind.BACKWARD_WEIGHT or not 0 <= to < self.stages:
                continue
            away = self.placement[to] != self.placement[stage]
            if away and self.transfers:
                continue
            sent_by = _SENT_BY[kind]
            number = self.distances[sent_by] + stage * self.m + (microbatch or 0)
            time = self._send_time(Action(stage, sent_by, microbatch)) if away else 0.0
            self._arrive(number, end + time, woken)

    def _post(self, action: Action, clock: float, woken: list[int]) -> None:
        """Reach one end of a transfer; at the second, it takes place."""
        stage, kind, microbatch, _ = action
        number = self.distances[kind] + stage * self.m + (microbatch or 0)
        other = self.posted.pop(number, None)
        if other is None:
            self.posted[number] = clock
        else:
            time = self._send_time(action if kind.is_send else action.other_end)
            self._arrive(number, max(other, clock) + time, woken)

    def _send_time(self, send: Action) -> float:
        return self.send_time(send) if callable(self.send_time) else self.send_time

    def _arrive(self, number: int, time: float, woken: list[int]) -> None:
        self.arrived[number] = time
        rank = self.blocked.pop(number, None)
        if rank is not None:
            woken.append(rank)

    def wait(self, rank: int) -> _Wait:
        at = len(self.ends[rank])
        number = next(n for n, waiting in self.blocked.items() if waiting == rank)
        forward = number < self.gradients
        stage, microbatch = divmod(number % self.gradients, self.m)
        producer = stage - 1 if forward else stage + 1
        if self.transfers and self.placement[producer] != rank:
            kind = Kind.SEND_F if forward else Kind.SEND_B
        else:
            kind = Kind.FORWARD if forward else Kind.FULL_BACKWARD
        awaited = Action(producer, kind, microbatch)
        return _Wait(at, self.lists[rank][at], awaited, self.placement[producer])


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
