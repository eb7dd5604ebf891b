"""Sources of a page's content: a run in progress (`Live`), or files of one (`Recorded`).

Both are a `PageSource`: a view, curves, lines of output, and a number that grows with each change.

Files may come from an attacker. So only so many are read, and only so many bytes of them; the
content of one is held to what a rank could have written (`_LIMITS`); and where a part of the page
cannot be made of them, the page says so.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dure.errors import UsageError
from dure.trace.events import State
from dure.trace.findings import study
from dure.trace.merging import Flight, Limits, RankFile, read_files
from dure.viewer import study as parts
from dure.viewer.charts import Charts
from dure.viewer.view import Failure, Feed, PageView, RankRow, RunOutcome, Site

__all__ = ["Live", "Output", "PageSource", "Recorded"]

T = TypeVar("T")
_MOST_FILES = 512
_MOST_MEMBERS, _MOST_GROUPS, _MOST_RECORDS, _MOST_SPANS = 4096, 1024, 20_000, 100_000
_MOST_LINES, _LONGEST_LINE, _MOST_SENTENCES = 500, 1000, 20
_SLOTS = 300  # of the parts of steps, in a recorded run


class Output:
    """The last lines of each rank, numbered."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[tuple[int, str, str]]] = {}
        self._number = 0

    def add(self, rank: int, stream: str, text: str) -> None:
        """Add a line of a rank."""
        self._number += 1
        lines = self._lines.setdefault(rank, deque(maxlen=_MOST_LINES))
        lines.append((self._number, stream, text[:_LONGEST_LINE]))

    def since(self, rank: int, number: int) -> list[tuple[int, str, str]]:
        """Return the lines of a rank behind the one with this number, as (number, stream, text)."""
        return [line for line in self._lines.get(rank, ()) if line[0] > number]


class PageSource:
    """What a page shows, and when it has changed.

    Attributes:
        view: All but curves and output.
        charts: Curves.
        output: Lines.
        version: Grows with each change.
        over: Whether nothing will change any more.
        num_readers: How many follow it; a reader with the last state follows no longer.
    """

    def __init__(self, title: str, live: bool, charts: Charts) -> None:
        self.view = PageView(title=title, live=live)
        self.charts = charts
        self.output = Output()
        self.version = 1
        self.over = not live
        self.num_readers = 0
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Let readers know."""
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, version: int, seconds: float) -> bool:
        """Wait until there is something newer than `version`; False: not in that time."""
        if self.version <= version:
            try:
                await asyncio.wait_for(self._changed.wait(), seconds)
            except TimeoutError:
                return False
        return True

    def _show(self, flight: Flight) -> None:
        """Make the parts of the page that need the files alone."""
        view = self.view
        problems = list(flight.problems)
        self._try(problems, "curves", lambda: self.charts.take(flight), None)
        view.waits = self._try(problems, "waits", lambda: parts.waits(flight), [])
        view.collectives = self._try(problems, "collectives", lambda: parts.collectives(flight), [])
        view.timeline = self._try(problems, "timeline", lambda: parts.timeline(flight), None)
        view.problems = problems[:_MOST_SENTENCES]

    def _try(self, problems: list[str], what: str, make: Callable[[], T], otherwise: T) -> T:
        """Make a part of the page; contents of files may be anything, and make no sense."""
        try:
            return make()
        except Exception as error:
            problems.append(f"{what}: cannot be shown ({type(error).__name__}: {error})"[:200])
            return otherwise


class Live(PageSource):
    """A run in progress, from what the launcher feeds and the ranks publish.

    Args:
        title: The run.
        folder: Where the ranks publish.
    """

    def __init__(self, title: str, folder: Path) -> None:
        super().__init__(title, True, Charts(zero_ns=time.time_ns()))
        self._folder = folder
        self._flight: Flight | None = None
        self._written: list[int] = []
        self._progress: dict[int, tuple[int, int, float]] = {}  # of a rank: pid, step, when

    def feed(self, feed: Feed) -> None:
        """Take a message of the launcher."""
        view = self.view
        view.ranks, view.elapsed_s = feed.ranks, feed.elapsed_s
        for line in feed.lines:
            self.output.add(*line)
        for row in view.ranks:
            self._note_progress(row, feed.elapsed_s)
            _complete(row, self._flight)
        view.outcome = feed.outcome or view.outcome

    def _note_progress(self, row: RankRow, now_s: float) -> None:
        if row.step is None:
            return
        pid, step, at_s = self._progress.get(row.rank, (0, 0, 0.0))
        if pid == row.pid and row.step > step:
            self.charts.progressed(row.rank, now_s, (now_s - at_s) * 1e3 / (row.step - step))
        if (pid, step) != (row.pid, row.step):
            self._progress[row.rank] = row.pid, row.step, now_s

    def look(self) -> None:
        """Read what the ranks have published, and let readers know what is new."""
        paths = sorted(self._folder.glob("rank*.json"))[:_MOST_FILES]
        written = [path.stat().st_mtime_ns for path in paths]
        if written != self._written:
            self._written = written
            with suppress(UsageError):  # none is complete yet
                self._flight = read_files(paths, "the page's folder", _LIMITS)
                self._show(self._flight)
        for row in self.view.ranks:
            _complete(row, self._flight)
        self.view.failure = self._failure(self._flight)
        self.changed()

    def end(self) -> None:
        """Nothing comes any more."""
        self.charts.finish()
        self.look()
        self.over = True
        self.changed()

    def _failure(self, flight: Flight | None) -> Failure | None:
        outcome = self.view.outcome or RunOutcome(ok=True, text="")
        failed = [row for row in self.view.ranks if row.state == "failed"]
        if not failed and not outcome.headline:
            return None
        failure = Failure(headline=outcome.headline, traceback=outcome.traceback)
        first = outcome.first
        if not outcome.headline:
            first = failed[0].rank
            failure.headline = f"rank {first} failed: {failed[0].last}"
        sites: dict[int, Site] = {}
        if flight is not None:
            sites = self._try([], "sites", lambda: parts.sites(flight), sites)
            for rank, site in sites.items():
                if not flight.ranks[rank].failure:
                    site.how = f"{site.how}, when last heard of".removeprefix(", ")
            found = self._try([], "findings", lambda: study(flight).differences, ())
            failure.sentences = list(map(str, found[:_MOST_SENTENCES]))
        for site in outcome.sites:  # they are younger than what was published
            sites[site.ranks[0]] = site
        failure.sites = parts.together(sorted(sites.values(), key=lambda s: s.ranks[0] != first))
        return failure


def _complete(row: RankRow, flight: Flight | None) -> None:
    """Add to a rank's row the contents of its file, if it is of the same process."""
    file = None if flight is None else flight.ranks.get(row.rank)
    if file is None or file.pid != row.pid:
        return
    if row.state == "running":
        row.where = str(file.where or "")
    if file.marks:
        last = file.marks[-1]
        row.step = last.step if row.step is None else max(row.step, last.step)
        row.values = {**row.values, **dict(list(last.scalars.items())[:8])}


class Recorded(PageSource):
    """Files of a run that is over.

    Args:
        paths: Files of ranks, and folders of them.

    Raises:
        UsageError: There is no flight record in them.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        paths = list(paths)
        title = ", ".join(path.name or str(path) for path in paths[:3])
        found = [f for p in paths for f in (sorted(p.glob("*.json")) if p.is_dir() else [p])]
        flight = read_files(found[:_MOST_FILES], ", ".join(map(str, paths[:3])), _LIMITS)
        if len(found) > _MOST_FILES:
            more = f"{len(found) - _MOST_FILES} files more are not shown"
            flight = replace(flight, problems=(*flight.problems, more))
        super().__init__(title, False, Charts(_slot_s(flight)))
        self._show(flight)
        self.charts.finish()
        self.view.ranks = [_recorded_row(file, flight) for file in flight.ranks.values()]
        self.view.failure = self._try(
            self.view.problems, "failure", lambda: _recorded_failure(flight), None
        )


def _is_sane(file: RankFile) -> bool:
    return (
        -1 <= file.rank < 1 << 24
        and len(file.groups) <= _MOST_GROUPS
        and sum(len(group.ranks) for group in file.groups) <= _MOST_MEMBERS * 4
        and len(file.records) <= _MOST_RECORDS
        and len(file.spans) + len(file.marks) <= _MOST_SPANS
        and all(abs(ns) < 1 << 62 for ns in (file.clock.monotonic_ns, file.clock.time_ns))
    )


_LIMITS = Limits(each_bytes=16 << 20, all_bytes=128 << 20, accept=_is_sane)
"""Full records of one rank are some 5 MB, and take ten times as much when they have been read."""


def _slot_s(flight: Flight) -> float:
    """Return over how long to average the parts of steps, such that a curve fits the chart."""
    starts = [
        flight.time_ns(rank, span.start_ns)
        for rank, file in flight.ranks.items()
        for span in file.spans
    ]
    return max(1e-3, (max(starts) - min(starts)) / 1e9 / _SLOTS) if starts else 1.0


def _recorded_row(file: RankFile, flight: Flight) -> RankRow:
    broken = bool(file.records) and file.records[-1].state is State.FAILED
    row = RankRow(
        rank=file.rank,
        host=file.host,
        pid=file.pid,
        state="failed" if file.failure or broken else "recorded",
        where=str(file.where or ""),
        last=file.reason[:_LONGEST_LINE],
    )
    _complete(row, flight)
    return row


def _recorded_failure(flight: Flight) -> Failure | None:
    """Return what went wrong: the earliest error that is not the loss of another rank."""
    findings = study(flight)
    failed = [f for f in flight.ranks.values() if f.failure]
    failed.sort(
        key=lambda f: ("PeerLost" in f.failure[:40], flight.time_ns(f.rank, f.clock.monotonic_ns))
    )
    sentences = findings.sentences[:_MOST_SENTENCES]
    if not failed and not findings.failures and not sentences:
        return None
    if failed:
        headline = f"rank {failed[0].rank} failed: {failed[0].failure}"
    elif findings.failures:
        record = findings.failures[0]
        headline = (
            f"rank {record.global_rank}: {record.op} #{record.seq} failed with {record.error}"
        )
    else:
        headline = "the ranks did not do the same"
    return Failure(
        headline=headline, sentences=sentences, sites=parts.together(parts.sites(flight).values())
    )
