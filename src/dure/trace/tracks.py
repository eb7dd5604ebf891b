"""Steps on a timeline: a track of phases, and below it tracks of waits, buckets and modules.

    step        | data |  forward  |      backward          |wait for gradients| optimizer |
    buckets 1                            | bucket 0 |    | bucket 2 |
    buckets 2                                 | bucket 1       |

Slices of one track must not overlap, so a bucket is drawn on the first free track. A bucket beside
"backward" is hidden communication; one beside "wait for gradients" delays the step. A bucket is
drawn until the end of its operations, if the recorder still has them. Gathers and reductions of
sharded modules are drawn the same way on tracks named "modules".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import islice
from typing import Any

from dure.trace.merging import Flight, RankFile
from dure.trace.record import Record
from dure.trace.spans import STEP, WAITS, Span

__all__ = ["steps"]

_FIRST_TRACK = 1000  # above any number of groups

TraceEvent = dict[str, Any]
Track = tuple[str, int]
"""The kind of a track, and its number among those of that kind."""


def steps(flight: Flight, file: RankFile) -> list[TraceEvent]:
    """Return the trace events of a rank's spans."""
    ended = [record for record in file.records if record.end_ns]
    found = sorted(file.spans, key=lambda span: span.start_ns)
    placed = [(span, _end(span, ended)) for span in found]
    tracks = _tracks(placed)
    used = sorted(set(tracks), key=lambda track: (track[0] != STEP, track[0] != WAITS, track))
    numbers = {track: _FIRST_TRACK + i for i, track in enumerate(used)}
    events = _names(file.rank, numbers)
    for (span, end), track in zip(placed, tracks, strict=True):
        start_us = flight.time_ns(file.rank, span.start_ns) / 1000
        events.append(
            {
                "name": span.name,
                "cat": span.track,
                "ph": "X",
                "ts": start_us,
                "dur": flight.time_ns(file.rank, max(end, span.start_ns)) / 1000 - start_us,
                "pid": file.rank,
                "tid": numbers[track],
                "args": dict(span.details),
            }
        )
    return events


def _end(span: Span, records: list[Record]) -> int:
    """Return the end of a span; for a bucket, the end of the last operation that it started.

    These are the operations of its group that were called while the bucket was being started.
    """
    first = bisect_left(records, span.start_ns, key=lambda record: record.start_ns)
    past = bisect_right(records, span.started_ns, key=lambda record: record.start_ns)
    ends = [r.end_ns for r in islice(records, first, past) if r.group == span.group]
    return max(ends, default=span.end_ns)


def _tracks(placed: list[tuple[Span, int]]) -> list[Track]:
    """Return the track of each span: the first of its kind that is free at its start."""
    until: dict[str, list[int]] = {}
    tracks: list[Track] = []
    for span, end in placed:
        ends = until.setdefault(span.track, [])
        number = next((i for i, at in enumerate(ends) if at <= span.start_ns), len(ends))
        ends[number : number + 1] = [end]
        tracks.append((span.track, number))
    return tracks


def _names(rank: int, numbers: Mapping[Track, int]) -> list[TraceEvent]:
    """Name the tracks, and sort them above the groups' tracks, which have no sort index."""
    events: list[TraceEvent] = []
    for place, ((shown, number), tid) in enumerate(numbers.items()):
        label = f"{shown} {number + 1}" if (shown, 1) in numbers else shown
        head: TraceEvent = {"ph": "M", "pid": rank, "tid": tid}
        events.append(head | {"name": "thread_name", "args": {"name": label}})
        sort = {"sort_index": place - len(numbers)}
        events.append(head | {"name": "thread_sort_index", "args": sort})
    return events
