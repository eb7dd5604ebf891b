"""What the files of all ranks say for the page: pure functions from a `Flight` to rows of it.

A collective's time is that of the last rank to come, for the others' is mostly waiting. So a call's
duration is the least of all ranks', and what the first to come spent above that is `late_ms`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import fmean, median

import msgspec

from dure.schedules import Action
from dure.trace.events import State
from dure.trace.merging import Flight
from dure.trace.pipeline_steps import measured_step
from dure.trace.record import Record, describe
from dure.trace.spans import STEP, Span
from dure.trace.waiting import waiting
from dure.viewer.view import Collective, RankWait, Site, Timeline, TimelineRow

__all__ = ["anchor_of", "collectives", "sites", "timeline", "together", "waits"]

_MOST_ROWS, _MOST_BARS, _MOST_COLLECTIVES = 64, 400, 30
_AT_ONCE_S = 0.05
"""A rank that is in an operation for less is not said to wait."""


def waits(flight: Flight) -> list[RankWait]:
    """Return who waits for whom, the longest first."""
    return [
        RankWait(
            rank=each.rank,
            on=list(each.on),
            call=describe(each.call),
            at=each.call.site,
            since_s=each.since_s,
        )
        for each in waiting(flight)
        if each.since_s >= _AT_ONCE_S
    ][:_MOST_ROWS]


def collectives(flight: Flight) -> list[Collective]:
    """Return the operations of each group by size, those that move most per second first."""
    calls: dict[tuple[str, int], dict[int, Record]] = defaultdict(dict)
    for rank, file in flight.ranks.items():
        for record in file.records:
            if not record.is_message and record.state is State.SUCCEEDED and record.seq > 0:
                calls[record.group, record.seq][rank] = record
    kinds: dict[tuple[str, str, int], list[dict[int, Record]]] = defaultdict(list)
    for (group, _), members in calls.items():
        first = next(iter(members.values()))
        if len(members) == first.world_size or len(members) == len(flight.ranks):
            kinds[group, first.op, max(m.nbytes for m in members.values())].append(members)
    found = [_collective(*kind, members) for kind, members in kinds.items()]
    return sorted(found, key=lambda each: (-each.gbs, -each.calls))[:_MOST_COLLECTIVES]


def _collective(group: str, op: str, nbytes: int, calls: list[dict[int, Record]]) -> Collective:
    took = [[max(1, r.end_ns - r.start_ns) for r in members.values()] for members in calls]
    ns = median(min(each) for each in took)
    return Collective(
        op=op,
        group=group,
        ranks=max(len(members) for members in calls),
        calls=len(calls),
        nbytes=nbytes,
        ms=ns / 1e6,
        gbs=nbytes / ns,
        late_ms=fmean(fmean(each) - min(each) for each in took) / 1e6,
    )


def sites(flight: Flight) -> dict[int, Site]:
    """Return the last operation of each rank, where it was called, and where the rank was."""
    found: dict[int, Site] = {}
    for rank, file in flight.ranks.items():
        last = file.records[-1] if file.records else None
        found[rank] = Site(
            ranks=[rank],
            call="none" if last is None else describe(last),
            at="" if last is None else last.site,
            how="" if last is None else _how(last),
            where=str(file.where or "") if last is None or last.state is State.SUCCEEDED else "",
        )
    return found


def together(found: Iterable[Site]) -> list[Site]:
    """Put ranks together that were at the same place in the same call, in the order they come."""
    kinds: dict[tuple[str, str, str, str], Site] = {}
    for site in found:
        key = site.call, site.at, site.how, site.where
        if key in kinds:
            kinds[key].ranks += site.ranks
        else:
            kinds[key] = msgspec.structs.replace(site, ranks=list(site.ranks))
    return list(kinds.values())[:_MOST_ROWS]


def _how(record: Record) -> str:
    if record.state is State.STARTED:
        return "still in it"
    return f"failed with {record.error}" if record.state is State.FAILED else "ended"


def anchor_of(spans: list[Span]) -> str:
    """Return the name of the phase with which steps begin: the first that comes as often as any."""
    counts = Counter(span.name for span in spans)
    most = max(counts.values(), default=0)
    return next((span.name for span in spans if counts[span.name] >= most - 1 and most > 1), "")


def timeline(flight: Flight) -> Timeline | None:
    """Return the last step: of a pipeline its actions, otherwise the phases of each rank."""
    step = measured_step(flight)
    if step is not None:
        rows = [
            TimelineRow(
                rank=rank,
                bars=[(str(s.action), _kind(s.action), s.start, s.end) for s in spans[:_MOST_BARS]],
            )
            for rank, spans in enumerate(step.measured.spans[:_MOST_ROWS])
        ]
        title = f"pipeline, step {step.number}: bubble {step.measured.bubble:.1%}"
        return Timeline(title=title, length_ms=step.measured.step_time, rows=rows)
    return _phases(flight)


def _kind(action: Action) -> str:
    return str(action.kind.value) if action.kind.is_compute else "other"


def _phases(flight: Flight) -> Timeline | None:
    phases = {
        rank: sorted((s for s in file.spans if s.track == STEP), key=lambda s: s.start_ns)
        for rank, file in flight.ranks.items()
    }
    phases = {rank: spans for rank, spans in phases.items() if spans}
    complete: list[list[int]] = []
    for rank, spans in phases.items():
        anchor = anchor_of(spans)
        starts = [flight.time_ns(rank, s.start_ns) for s in spans if s.name == anchor]
        complete += [starts[-2:]] if len(starts) > 1 else []
    if not complete:
        return None
    start, end = min(complete, key=lambda pair: pair[1])
    rows: list[TimelineRow] = []
    for rank, spans in list(phases.items())[:_MOST_ROWS]:
        bars = [
            (s.name, s.name, (a - start) / 1e6, (b - start) / 1e6)
            for s in spans
            if (b := flight.time_ns(rank, s.end_ns)) > start
            and (a := flight.time_ns(rank, s.start_ns)) < end
        ]
        rows.append(TimelineRow(rank=rank, bars=bars[:_MOST_BARS]))
    return Timeline(title="phases of the last step", length_ms=(end - start) / 1e6, rows=rows)
