"""Content of the page, and the launcher's messages for it: plain values, which JSON carries.

`Feed` comes from the launcher, `PageView` goes to the browser. Any text in them was written by
programs and is shown as text alone: the page makes no markup of it.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "Collective",
    "Failure",
    "Feed",
    "PageView",
    "RankRow",
    "RankWait",
    "RunOutcome",
    "Site",
    "Timeline",
    "TimelineRow",
]


class RankRow(msgspec.Struct, kw_only=True):
    """A rank: times in seconds, memory in bytes, `cpu` as a share of one core.

    `where` is the program's own line that its main thread is at.
    """

    rank: int
    host: str = ""
    pid: int = 0
    state: str = "running"
    step: int | None = None
    total: int | None = None
    values: dict[str, float | str | None] = {}
    memory: int | None = None
    cpu: float | None = None
    quiet_s: float | None = None
    where: str = ""
    last: str = ""


class RankWait(msgspec.Struct, kw_only=True):
    """A rank in an operation, the ranks that have not come to it, and since when."""

    rank: int
    on: list[int]
    call: str
    at: str
    since_s: float


class Collective(msgspec.Struct, kw_only=True):
    """The calls of an operation of one size in one group.

    `ms` is the time of the last rank to come, as a median: the cost of the operation itself; `gbs`
    its bytes in that time; `late_ms` what the others waited for it, on average.
    """

    op: str
    group: str
    ranks: int
    calls: int
    nbytes: int
    ms: float
    gbs: float
    late_ms: float


class TimelineRow(msgspec.Struct, kw_only=True):
    """What a rank did: (name, kind, start in ms, end in ms) each."""

    rank: int
    bars: list[tuple[str, str, float, float]]


class Timeline(msgspec.Struct, kw_only=True):
    """The last step of all ranks."""

    title: str
    length_ms: float
    rows: list[TimelineRow]


class Site(msgspec.Struct, kw_only=True):
    """The last calls of ranks, their places and results, and where the ranks were then."""

    ranks: list[int]
    call: str
    at: str
    how: str
    where: str = ""


class Failure(msgspec.Struct, kw_only=True):
    """The first failure: a headline, the mismatch, where each rank was."""

    headline: str
    sentences: list[str] = []
    sites: list[Site] = []
    traceback: str = ""


class RunOutcome(msgspec.Struct, kw_only=True):
    """How the run has ended.

    `headline`, `traceback` and `first` (the rank) are of the first failure; `sites` is what ranks
    reported when they were asked because of it.
    """

    ok: bool
    text: str
    headline: str = ""
    traceback: str = ""
    first: int | None = None
    sites: list[Site] = []


class PageView(msgspec.Struct, kw_only=True):
    """Everything on the page but curves and output."""

    title: str
    live: bool
    elapsed_s: float = 0.0
    ranks: list[RankRow] = []
    waits: list[RankWait] = []
    collectives: list[Collective] = []
    timeline: Timeline | None = None
    failure: Failure | None = None
    outcome: RunOutcome | None = None
    problems: list[str] = []


class Feed(msgspec.Struct, kw_only=True):
    """A message of the launcher: this host's ranks, and their output as (rank, stream, line)."""

    elapsed_s: float
    ranks: list[RankRow]
    lines: list[tuple[int, str, str]] = []
    outcome: RunOutcome | None = None
