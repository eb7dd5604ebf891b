"""The page's curves: step time, its parts, and what the program logs, as points that add up.

Files come again and again with what is newest (`dure.trace.publishing`), and overlap; so a mark or
a span counts once, by its time. Where a curve has too many points every other one goes, and its
`generation` makes readers fetch it again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field

from dure.trace.marks import Mark
from dure.trace.merging import Flight
from dure.trace.spans import STEP, Span
from dure.viewer.study import anchor_of

__all__ = ["Charts", "Curve"]

MOST_POINTS, MOST_CURVES, _MOST_NAMES = 2000, 200, 24
Key = tuple[str, str, int]
"""What a curve is of: "step", "part" or "scalar"; a name; a rank (-1: the mean of all)."""


@dataclass(slots=True)
class Curve:
    """The points of a curve, the oldest first; None is a gap."""

    xs: list[float] = field(default_factory=list[float])
    ys: list[float | None] = field(default_factory=list["float | None"])
    generation: int = 0

    def add(self, x: float, y: float | None) -> None:
        """Add a point behind the last; where the program went back, in place of what follows."""
        if self.xs and x <= self.xs[-1]:
            first = bisect_left(self.xs, x)
            del self.xs[first:], self.ys[first:]
            self.generation += 1
        self.xs.append(x)
        self.ys.append(y)
        if len(self.xs) > MOST_POINTS:
            self.xs, self.ys = self.xs[::2], self.ys[::2]
            self.generation += 1


@dataclass(slots=True)
class _Seen:
    """What was taken of one rank."""

    anchor: str = ""
    mark: Mark | None = None
    span_ns: int = -1
    began_ns: int = -1
    parts: dict[str, float] = field(default_factory=dict[str, float])


class Charts:
    """Collects the curves.

    Args:
        slot_s: Over how long the parts of steps are averaged.
        zero_ns: The time of day from which the curves' times count; None: the earliest record.
    """

    def __init__(self, slot_s: float = 1.0, zero_ns: int | None = None) -> None:
        self.curves: dict[Key, Curve] = {}
        self._slot_s = slot_s
        self._slot = -1
        self._steps: list[dict[str, float]] = []
        self._seen: dict[int, _Seen] = defaultdict(_Seen)
        self._zero_ns = zero_ns
        self._names: dict[str, None] = {}

    def take(self, flight: Flight) -> None:
        """Take what is new in the files."""
        if self._zero_ns is None:
            self._zero_ns = flight.zero_ns
        steps: list[tuple[float, dict[str, float]]] = []
        for rank, file in flight.ranks.items():
            shift_ns = flight.time_ns(rank, 0) + flight.zero_ns - self._zero_ns
            self._take_marks(rank, file.marks, shift_ns)
            spans = sorted((s for s in file.spans if s.track == STEP), key=lambda s: s.start_ns)
            steps += self._take_spans(rank, spans, shift_ns)
        for at_s, parts in sorted(steps, key=lambda step: step[0]):
            self._add_parts(at_s, parts)

    def finish(self) -> None:
        """Draw what was kept for an average."""
        self._end_slot()

    def progressed(self, rank: int, at_s: float, step_ms: float) -> None:
        """Add a step's time as the launcher saw it, of a rank that publishes nothing better."""
        seen = self._seen[rank]
        if seen.mark is None and seen.span_ns < 0:
            self._add(("step", "", rank), at_s, step_ms)

    def _add(self, key: Key, x: float, y: float | None) -> None:
        if key in self.curves or len(self.curves) < MOST_CURVES:
            self.curves.setdefault(key, Curve()).add(x, y)

    def _take_marks(self, rank: int, marks: tuple[Mark, ...], shift_ns: int) -> None:
        seen = self._seen[rank]
        for mark in marks:
            before = seen.mark
            if before is not None and mark.time_ns <= before.time_ns:
                continue
            if before is not None and mark.step > before.step:
                took_ms = (mark.time_ns - before.time_ns) / 1e6 / (mark.step - before.step)
                self._add(("step", "", rank), (mark.time_ns + shift_ns) / 1e9, took_ms)
            for name, value in mark.scalars.items():
                if name in self._names or len(self._names) < _MOST_NAMES:
                    self._names[name] = None
                    self._add(("scalar", name, rank), mark.step, value)
            seen.mark = mark

    def _take_spans(
        self, rank: int, spans: list[Span], shift_ns: int
    ) -> list[tuple[float, dict[str, float]]]:
        """Cut new phases into steps; return when each began, and its parts in ms."""
        seen = self._seen[rank]
        seen.anchor = seen.anchor or anchor_of(spans)
        done: list[tuple[float, dict[str, float]]] = []
        for span in spans:
            if span.start_ns <= seen.span_ns:
                continue
            seen.span_ns = span.start_ns
            if span.name == seen.anchor:
                if seen.began_ns >= 0:
                    at_s, took_ms = _step(seen, span.start_ns, shift_ns)
                    if seen.mark is None:
                        self._add(("step", "", rank), at_s, took_ms)
                    done.append((at_s, seen.parts))
                seen.began_ns, seen.parts = span.start_ns, {}
            part_ms = max(0, span.end_ns - span.start_ns) / 1e6
            seen.parts[span.name] = seen.parts.get(span.name, 0.0) + part_ms
        return done

    def _add_parts(self, at_s: float, parts: dict[str, float]) -> None:
        slot = int(at_s / self._slot_s)
        if slot > self._slot:  # a rank may be behind the others
            self._end_slot()
            self._slot = slot
        self._steps.append(parts)

    def _end_slot(self) -> None:
        names = dict.fromkeys(name for parts in self._steps for name in parts)
        for name in list(names)[:_MOST_NAMES]:
            mean = sum(parts.get(name, 0.0) for parts in self._steps) / len(self._steps)
            self._add(("part", name, -1), self._slot * self._slot_s, mean)
        self._steps = []


def _step(seen: _Seen, next_ns: int, shift_ns: int) -> tuple[float, float]:
    """Return when a step began, in seconds, and how long it took, in ms; complete its parts."""
    took_ms = (next_ns - seen.began_ns) / 1e6
    seen.parts["other"] = max(0.0, took_ms - sum(seen.parts.values()))
    return (seen.began_ns + shift_ns) / 1e9, took_ms
