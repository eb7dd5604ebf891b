"""A pipeline's step as it was measured, beside the same lists simulated with the measured times.

The simulated step is what the ranks would take if transfers took no time and each action of a kind
and stage took what its median was: what is above it was spent on waiting for what was late.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from dure.schedules import Action, Kind, Schedule, Simulation, Span, simulate, validate
from dure.trace.merging import Flight

__all__ = ["MeasuredStep", "measured_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """The last whole step of a pipeline, times in milliseconds.

    Attributes:
        group: Name of the group.
        number: Of the step.
        measured: When each action ran.
        simulated: When it would have run.
    """

    group: str
    number: int
    measured: Simulation
    simulated: Simulation


def measured_step(flight: Flight) -> MeasuredStep | None:
    """Return the last step of a pipeline that all its ranks have recorded; None without one."""
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
                    spans.clear()  # the group has another pipeline by now
                spans[action] = Span(action, start, end)
    whole = [(number, group) for (group, number), ranks in found.items() if _is_whole(ranks)]
    if not whole:
        return None
    number, group = max(whole)
    ranks = found[group, number]
    measured = _measured([list(ranks[rank].values()) for rank in sorted(ranks)])
    return MeasuredStep(
        group=group, number=number, measured=measured, simulated=_simulated(measured)
    )


def _is_whole(ranks: dict[int, dict[Action, Span]]) -> bool:
    """Tell whether there is each rank, and each forward of each stage."""
    parts = {part for spans in ranks.values() for action in spans for part in action.parts}
    forwards = {(p.stage, p.microbatch) for p in parts if p.kind is Kind.FORWARD}
    stages, microbatches = {s for s, _ in forwards}, {m for _, m in forwards}
    number = len(stages) * len(microbatches)
    return sorted(ranks) == [*range(len(ranks))] and 0 < number == len(forwards)


def _measured(lists: list[list[Span]]) -> Simulation:
    """Return what was measured in the form of a simulation, with times from the first start."""
    first = min(span.start for spans in lists for span in spans)
    shifted = tuple(
        tuple(Span(span.action, span.start - first, span.end - first) for span in spans)
        for spans in lists
    )
    schedule = Schedule.of_lists([[span.action for span in spans] for spans in shifted], "measured")
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
