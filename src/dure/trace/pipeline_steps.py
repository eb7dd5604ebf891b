"""A measured step of a pipeline, and a simulation of it without delays.

The simulation uses the measured actions in their order, no time for transfers, and for each kind of
action and stage the median of its times. The difference was spent waiting for late actions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from dure.schedules import Action, Kind, Schedule, Simulation, Span, Spans, simulate, validate
from dure.trace.merging import Flight

__all__ = ["MeasuredStep", "measured_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """The last complete step of a pipeline, times in milliseconds.

    Attributes:
        group: Name of the group.
        number: Number of the step.
        measured: The measured times of the actions.
        simulated: The times of the simulation.
    """

    group: str
    number: int
    measured: Simulation
    simulated: Simulation


def measured_step(flight: Flight) -> MeasuredStep | None:
    """Return the last step that all ranks of a pipeline have recorded; None if there is none."""
    found: dict[tuple[str, int], dict[int, dict[Action, Span]]]
    found = defaultdict(lambda: defaultdict(dict))
    for file in flight.ranks.values():
        for span in sorted(file.spans, key=lambda span: span.start_ns):
            text = span.details.get("action")
            if isinstance(text, str):
                action = Action.parse(text)
                start, end = (
                    flight.time_ns(file.rank, t) / 1e6 for t in (span.start_ns, span.end_ns)
                )
                spans = found[span.group, int(span.details["step"])][int(span.details["rank"])]
                if action in spans:
                    spans.clear()  # a newer pipeline of the same group
                spans[action] = Span(action, start, end)
    complete = [(number, group) for (group, number), ranks in found.items() if _is_complete(ranks)]
    if not complete:
        return None
    number, group = max(complete)
    ranks = found[group, number]
    measured = _measured([list(ranks[rank].values()) for rank in sorted(ranks)])
    return MeasuredStep(
        group=group, number=number, measured=measured, simulated=_simulated(measured)
    )


def _is_complete(ranks: dict[int, dict[Action, Span]]) -> bool:
    """Return whether every rank and every forward action of every stage was recorded."""
    parts = {part for spans in ranks.values() for action in spans for part in action.parts}
    forwards = {(p.stage, p.microbatch) for p in parts if p.kind is Kind.FORWARD}
    stages, microbatches = {s for s, _ in forwards}, {m for _, m in forwards}
    number = len(stages) * len(microbatches)
    return sorted(ranks) == [*range(len(ranks))] and 0 < number == len(forwards)


def _measured(lists: list[list[Span]]) -> Simulation:
    """Return the measured step as a `Simulation`, with times from the first start."""
    first = min(span.start for spans in lists for span in spans)
    shifted = tuple(
        Spans(
            [span.action for span in spans],
            [span.start - first for span in spans],
            [span.end - first for span in spans],
        )
        for spans in lists
    )
    schedule = Schedule.of_lists([[span.action for span in spans] for spans in lists], "measured")
    peaks = validate(schedule)
    return Simulation(
        schedule=schedule,
        spans=shifted,
        step_time=max(span.end for spans in shifted for span in spans),
        peak_activations=peaks,
        peak_bytes=tuple(map(float, peaks)),
    )


def _simulated(measured: Simulation) -> Simulation:
    took: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for spans in measured.spans:
        for span in spans:
            took[span.action.parts[0].stage, span.action.kind].append(span.end - span.start)
    medians = {key: median(times) for key, times in took.items()}
    return simulate(measured.schedule, lambda action: medians[action.parts[0].stage, action.kind])
