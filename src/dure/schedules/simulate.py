"""Duration, idle time and memory of a step: computed from times, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dure.errors import UsageError
from dure.schedules.actions import Action, Kind, Schedule
from dure.schedules.execution import Spans, execute
from dure.schedules.validate import peak_held, validate

__all__ = ["DEFAULT_TIMES", "Simulation", "Times", "cost_function", "simulate"]

Times = Callable[[Action], float] | Mapping[str, float | Sequence[float]]

DEFAULT_TIMES: dict[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""What the actions of a stage take where nothing else is said, in units of a forward."""


def cost_function(times: Times) -> Callable[[Action], float]:
    """Return the function that gives an action its time.

    Args:
        times: Such a function; or a table of a time for each kind ("F", "B", ...), or of a sequence
            with a time for each stage. In a table, B is I + W where it is missing, I and W are half
            of B, OVERLAP_F_B is the sum of its parts, and all others take none.

    Raises:
        UsageError: The table has kinds that there are not, too few of them, or negative times.
    """
    if callable(times):
        return times
    table: dict[str, float | Sequence[float]] = dict(times)
    unknown = [kind for kind in table if kind not in set(Kind)]
    if unknown or "F" not in table or ("B" not in table and not {"I", "W"} <= set(table)):
        raise UsageError(
            "the table of times is incomplete",
            seen=", ".join(map(str, table)) or "nothing",
            fix="Give F and B, or F, I and W; other kinds may be added.",
        )

    def time_of(action: Action) -> float:
        stage, kind, _, parts = action
        given = table.get(kind)
        if given is not None:
            return float(given) if isinstance(given, int | float) else float(given[stage])
        if parts is not None:
            return sum(map(time_of, parts))
        if kind is Kind.FULL_BACKWARD:
            halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
            return sum(time_of(Action(stage, half)) for half in halves)
        if kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            return time_of(Action(stage, Kind.FULL_BACKWARD)) / 2
        return 0.0

    return time_of


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a step of a schedule takes.

    Args:
        schedule: The simulated schedule.
        spans: For each rank its actions with start and end, in order; SEND and RECV are posted at
            their end.
        step_time: From the first start to the last end.
        peak_activations: For each rank, the most microbatches' activations that it holds at once,
            counted over its stages.
        peak_bytes: The same in bytes of `activation_bytes`.

    Obtained from:
        `simulate`.
    """

    schedule: Schedule
    spans: tuple[Spans, ...]
    step_time: float
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[float, ...]

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each rank the share of the step in which it idles, 0 to 1."""
        busy = (spans.busy_time for spans in self.spans)
        return tuple(1 - each / self.step_time if self.step_time else 0.0 for each in busy)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they idle, 0 to 1."""
        return sum(self.bubbles) / len(self.spans)


def simulate(
    schedule: Schedule,
    times: Times = DEFAULT_TIMES,
    *,
    send_time: float | Callable[[Action], float] = 0.0,
    activation_bytes: float | Sequence[float] = 1.0,
) -> Simulation:
    """Return when each action of a grid, or of lists with transfers, runs.

    Ranks wait for data only: data arrives `send_time` after both ends have been posted (in
    a grid: after the result is computed), and its rank continues. Linear in the number of actions.

    Args:
        schedule: The schedule to simulate.
        times: The time of each action; see `cost_function`. In any unit.
        send_time: From a SEND to its arrival, in the same unit; or a function of the SEND.
        activation_bytes: Memory of a stage per microbatch between forward and backward; or a
            number for each stage.

    Raises:
        ScheduleError: The schedule is incomplete or wrong, or its ranks wait for each other.
        UsageError: A table of times is incomplete.

    Example:
        ```python
        from dure.schedules import make_schedule, simulate

        schedule = make_schedule("1f1b", stages=2, microbatches=4, ranks=2)
        found = simulate(schedule, {"F": 1.0, "B": 2.0})
        assert found.step_time == 15.0                       # 4 x 3 of computing, and 3 of waiting
        ```
    """
    peaks = validate(schedule)
    spans = execute(schedule, cost_function(times), send_time).spans
    step_time = max((rank[-1].end for rank in spans if rank), default=0.0)
    return Simulation(
        schedule,
        tuple(spans),
        step_time,
        peaks,
        tuple(peak_held(schedule.actions(rank), activation_bytes) for rank in range(len(spans))),
    )
