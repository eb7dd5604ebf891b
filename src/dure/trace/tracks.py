"""Steps on a timeline: a track of phases, below it tracks of what travels meanwhile, and of waits.

    step        | data |  forward  |      backward          |wait for gradients| optimizer |
    buckets 1                            | bucket 0 |    | bucket 2 |
    buckets 2                                 | bucket 1       |

Slices of one track must not overlap, so a bucket goes to the first track that is free. One beside
backward is communication that costs nothing; one beside "wait for gradients" is what the step waits
for. A bucket lasts as long as the operations that it started, where the recorder still has them. So
do gathers and reductions of a sharded module, which lie on tracks of "modules".
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

_FIRST_TRACK = 1000  # above the number of groups that anybody makes

TraceEvent = dict[str, Any]
Track = tuple[str, int]
"""What a track shows, and its number among those that show the same."""


def steps(flight: Flight, file: RankFile) -> list[TraceEvent]:
    """Return the trace events of a rank's spans; none where steps were not recorded."""
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
    """Return when a span ended: of a bucket, when the last operation did that it started.

    Those are the ones of its group that were called while the bucket was being started.
    """
    first = bisect_left(records, span.start_ns, key=lambda record: record.start_ns)
    past = bisect_right(records, span.started_ns, key=lambda record: record.start_ns)
    ends = [r.end_ns for r in islice(records, first, past) if r.group == span.group]
    return max(ends, default=span.end_ns)


def _tracks(placed: list[tuple[Span, int]]) -> list[Track]:
    """Return the track of each span: the first of its kind that is free when it begins."""
    until: dict[str, list[int]] = {}
    tracks: list[Track] = []
    for span, end in placed:
        ends = until.setdefault(span.track, [])
        number = next((i for i, at in enumerate(ends) if at <= span.start_ns), len(ends))
        ends[number : number + 1] = [end]
        tracks.append((span.track, number))
    return tracks


def _names(rank: int, numbers: Mapping[Track, int]) -> list[TraceEvent]:
    """Name the tracks, and put them above the groups', which have no place of their own."""
    events: list[TraceEvent] = []
    for place, ((shown, number), tid) in enumerate(numbers.items()):
        label = f"{shown} {number + 1}" if (shown, 1) in numbers else shown
        head: TraceEvent = {"ph": "M", "pid": rank, "tid": tid}
        events.append(head | {"name": "thread_name", "args": {"name": label}})
        sort = {"sort_index": place - len(numbers)}
        events.append(head | {"name": "thread_sort_index", "args": sort})
    return events
