"""The plot of a report: time and bus bandwidth over size, one line a contestant.

As a page of HTML it has a pair of charts for each operation, and says on what machine they were
taken; as SVG it is the charts alone. Both axes are logarithmic. A barrier has no size and no chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from dure.cli.bench.plan import show_size
from dure.cli.bench.results import Cell, Key, Report, tables_of
from dure.cli.bench.table import html_of
from dure.cli.charts import Axis, Series, line_chart
from dure.cli.page import (
    DRAWING,
    Page,
    definitions,
    figure,
    section,
    side_by_side,
    variables,
)

__all__ = ["write_plot"]

_COLOURS = {
    "c0": ("#1769c2", "#5aa4ee"),
    "c1": ("#d9722b", "#ee9a5c"),
    "c2": ("#2f8f63", "#62bd90"),
    "c3": ("#8b5bbf", "#b893e3"),
    "c4": ("#b08a1e", "#d8b552"),
    "c5": ("#7d838b", "#9aa0a8"),
}
_FRAME = {  # what the page's style sheet gives to charts, and a picture has to bring
    "card": ("#ffffff", "#1e2123"),
    "soft": ("#62666b", "#9da2a8"),
    "rule": ("#e3e3df", "#33373a"),
    "ink": ("#1d1f21", "#e8e8e6"),
}
_STYLE = (
    "body { max-width: 1400px; } td { font-size: 14px; }\n.line.c0 { stroke-width: 3.5; }\n"
    + "\n".join(f".line.{name} {{ stroke: var(--{name}); }}" for name in _COLOURS)
)
_MARKS = 7
_WIDTH, _HEIGHT, _TITLE = 560, 320, 34


def write_plot(path: Path, report: Report) -> None:
    """Write the report's charts to `path`: a page if it ends in .html, else an SVG.

    Raises:
        OSError: The file cannot be written.
    """
    path.write_text(_page(report) if path.suffix == ".html" else _svg(report), "utf-8")


def _page(report: Report) -> str:
    """Return the page: charts and a table for each operation, then the machine."""
    blocks: list[str] = []
    for key, rows in tables_of(report.cells).items():
        cells = [cell for row in rows.values() for cell in row.values()]
        charts = _charts(key, rows, report.contestants)
        table = html_of(cells, report.contestants)
        blocks.append(side_by_side([figure(title, svg) for title, svg in charts]))
        blocks.append(f'<div class="grid2">{section(table, key.title)}</div>')
    about = [
        section(definitions(list(report.machine.items())), "On what machine"),
        section(definitions([("Command", report.command), *report.versions.items()]), "What ran"),
    ]
    first = report.contestants[0] if report.contestants else "dure"
    rivals = ", ".join(report.contestants[1:])
    return Page(
        kicker="dure bench",
        headline=f"{first}, beside {rivals}" if rivals else f"Collectives on {first}",
        lead=f"{report.machine.get('Processor', '')}. {report.when}. Time is the median of "
        f"{report.plan.samples} samples, of the slowest rank.",
        colours=_COLOURS,
        style=_STYLE,
        blocks=[*blocks, side_by_side(about)],
    ).html()


def _svg(report: Report) -> str:
    """Return all charts as one picture, a row for each operation."""
    rows = [
        (key, _charts(key, cells, report.contestants))
        for key, cells in tables_of(report.cells).items()
    ]
    rows = [(key, charts) for key, charts in rows if charts]
    width, height = 2 * _WIDTH + 24, max(1, len(rows)) * (_HEIGHT + _TITLE)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="system-ui, sans-serif" font-size="12">',
        f"<style>:root {{ {variables(_COLOURS | _FRAME, dark=False)} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ "
        f"{variables(_COLOURS | _FRAME, dark=True)} }} }}",
        f"{DRAWING}\n{_STYLE}\n.paper {{ fill: var(--card); }}",
        "svg text.title { fill: var(--ink); font-size: 15px; font-weight: 600; }</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
    ]
    for i, (key, charts) in enumerate(rows):
        top = i * (_HEIGHT + _TITLE)
        out.append(f'<text class="title" x="16" y="{top + 24}">{escape(key.title)}</text>')
        for j, (_, chart) in enumerate(charts):
            place = f'<svg x="{j * _WIDTH}" y="{top + _TITLE}" width="{_WIDTH}" height="{_HEIGHT}" '
            out.append(chart.replace("<svg ", place, 1))
    return "\n".join([*out, "</svg>", ""])


def _charts(
    key: Key, rows: Mapping[int, Mapping[str, Cell]], contestants: Sequence[str]
) -> list[tuple[str, str]]:
    """Return (title, SVG) of time and bus bandwidth; none where there is only one size."""
    sizes = [size for size in rows if size]
    if len(sizes) < 2:
        return []
    x = Axis(label="size", show=lambda v: show_size(int(v)), log=True, marks=_size_marks(sizes))
    wanted: list[tuple[str, Axis, Callable[[Cell], float | None]]] = [
        ("time", Axis(label="", show=_short_time, log=True), lambda cell: cell.median_s),
        (
            "bus bandwidth",
            Axis(label="bus bandwidth (GB/s)", show=_power, log=True),
            lambda cell: cell.bus_gb_s,
        ),
    ]
    out: list[tuple[str, str]] = []
    for what, y, figure_of in wanted:
        lines: list[Series] = []
        for name in contestants:
            found = [(size, rows[size].get(name)) for size in sorted(sizes)]
            values = [(size, figure_of(cell)) for size, cell in found if cell is not None]
            lines.append(Series(name, [(size, v) for size, v in values if v is not None]))
        title = f"{key.title}: {what}"
        out.append((title, line_chart(title, lines, x, y)))
    return out


def _size_marks(sizes: Sequence[int]) -> list[float]:
    """Return powers of two, equally far apart, that hold all sizes."""
    first, last = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    step = max(1, math.ceil((last - first) / _MARKS))
    steps = max(1, math.ceil((last - first) / step))
    return [2.0 ** (first + i * step) for i in range(steps + 1)]


def _power(value: float) -> str:
    """Write a power of ten in at most four characters."""
    if value >= 0.009:
        return f"{value:g}"
    return "10" + f"{math.log10(value):.0f}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _short_time(seconds: float) -> str:
    """Write a power of ten with its unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale * 0.999:
            return f"{seconds / scale:g} {unit}"
    return f"{seconds / 1e-9:g} ns"
