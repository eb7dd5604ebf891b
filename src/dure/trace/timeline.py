"""A timeline of all ranks in the trace-event format, for Perfetto and Chrome.

Each rank is a process; each group, and each further channel of a group, is a track of it.
Synchronous operations are slices on the track; they cannot overlap. Asynchronous ones may overlap,
so they are async events below the track. Recorded steps are drawn above the groups (`tracks`).
Times are microseconds from the earliest record.

Source: the trace-event format description,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from typing import Any

from dure.trace.events import State
from dure.trace.merging import Flight, RankFile
from dure.trace.record import Record
from dure.trace.tracks import steps

__all__ = ["timeline"]

TraceEvent = dict[str, Any]
"""One event of the format: an object of JSON."""


def timeline(flight: Flight) -> dict[str, Any]:
    """Return the timeline as an object for JSON.

    Args:
        flight: The files of all ranks.
    """
    events: list[TraceEvent] = []
    for file in flight.ranks.values():
        tracks = _tracks(file)
        events += _names(file, tracks)
        events += steps(flight, file)
        for number, record in enumerate(file.records):
            events += _operation(flight, file, record, tracks[record.group], number)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _tracks(file: RankFile) -> dict[str, int]:
    """Number the groups of a rank, including channels and old groups that its records name."""
    names = dict.fromkeys([*(g.name for g in file.groups), *(r.group for r in file.records)])
    return {name: i for i, name in enumerate(names, start=1)}


def _names(file: RankFile, tracks: dict[str, int]) -> list[TraceEvent]:
    """Name the rank and its groups, and put ranks in order."""
    rank = file.rank
    about = [
        {"name": "process_name", "args": {"name": f"rank {rank} ({file.host}, pid {file.pid})"}},
        {"name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    events = [e | {"ph": "M", "pid": rank, "tid": 0} for e in about]
    for name, tid in tracks.items():
        label = {"name": "thread_name", "args": {"name": f"group {name}"}}
        events.append(label | {"ph": "M", "pid": rank, "tid": tid})
    return events


def _operation(
    flight: Flight, file: RankFile, record: Record, track: int, number: int
) -> list[TraceEvent]:
    start = _microseconds(flight, file.rank, record.start_ns)
    end_ns = max(record.end_ns or file.clock.monotonic_ns, record.start_ns)
    end = _microseconds(flight, file.rank, end_ns)
    common: TraceEvent = {
        "name": record.op,
        "cat": "message" if record.is_message else "collective",
        "pid": file.rank,
        "tid": track,
    }
    if not record.async_op:
        return [common | {"ph": "X", "ts": start, "dur": end - start, "args": _arguments(record)}]
    spans = common | {"cat": "async", "id": f"{file.rank}.{number}"}
    return [
        spans | {"ph": "b", "ts": start, "args": _arguments(record)},
        spans | {"ph": "e", "ts": end},
    ]


def _arguments(record: Record) -> dict[str, Any]:
    values = {
        "seq": record.seq,
        "group": record.group,
        "bytes": record.nbytes,
        "dtype": record.dtype,
        "reduction": record.reduction,
        "peer": record.peer,
        "tag": record.tag,
        "at": record.site,
        "function": record.function,
        "state": "running" if record.state is State.STARTED else record.state.value,
        "error": record.error,
    }
    return {k: v for k, v in values.items() if v not in ("", None)}


def _microseconds(flight: Flight, rank: int, monotonic_ns: int) -> float:
    return flight.time_ns(rank, monotonic_ns) / 1000
