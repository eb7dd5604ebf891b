"""The plot of a report: time and bus bandwidth over size, one line a contestant.

It is a page of HTML with a pair of charts for each operation, and says on what machine they were
taken. Both axes are logarithmic. A barrier has no size and no chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from dure.cli import charts
from dure.cli.bench.plan import show_size
from dure.cli.bench.results import Cell, Key, Report, heads_and_rows, tables_of
from dure.cli.charts import Axis, Series, line_chart

_COLOURS = {
    "c0": ("#1769c2", "#5aa4ee"),
    "c1": ("#d9722b", "#ee9a5c"),
    "c2": ("#2f8f63", "#62bd90"),
    "c3": ("#8b5bbf", "#b893e3"),
    "c4": ("#b08a1e", "#d8b552"),
    "c5": ("#7d838b", "#9aa0a8"),
}
_STYLE = "body { max-width: 1400px; } td { font-size: 14px; }"
_MARKS = 7


def page(report: Report) -> str:
    """Return the page: charts and a table for each operation, then the machine."""
    blocks: list[str] = []
    for key, rows in tables_of(report.cells).items():
        pair = [charts.figure(title, svg) for title, svg in _charts(key, rows, report.contestants)]
        table = charts.html_table(*heads_and_rows(rows, report.contestants))
        blocks += [
            charts.side_by_side(pair),
            charts.side_by_side([charts.section(table, key.title)]),
        ]
    ran = [("Command", report.command), *report.versions.items()]
    about = [
        charts.section(charts.definitions(list(report.machine.items())), "On what machine"),
        charts.section(charts.definitions(ran), "What ran"),
    ]
    first = report.contestants[0] if report.contestants else "dure"
    rivals = ", ".join(report.contestants[1:])
    return charts.page(
        "dure bench",
        f"{first}, beside {rivals}" if rivals else f"Collectives on {first}",
        f"{report.machine.get('Processor', '')}. {report.when}. Time is the median of "
        f"{report.plan.samples} samples, of the slowest rank.",
        _COLOURS,
        [*blocks, charts.side_by_side(about)],
        _STYLE,
    )


def _charts(
    key: Key, rows: Mapping[int, Mapping[str, Cell]], contestants: Sequence[str]
) -> list[tuple[str, str]]:
    """Return (title, SVG) of time and bus bandwidth; none where there is only one size."""
    sizes = sorted(size for size in rows if size)
    if len(sizes) < 2:
        return []
    x = Axis("size", lambda v: show_size(int(v)), log=True, marks=_size_marks(sizes))
    figures: list[tuple[str, Axis, Callable[[Cell], float | None]]] = [
        ("time", Axis("", _short_time, log=True), attrgetter("median_s")),
        ("bus bandwidth", Axis("bus bandwidth (GB/s)", _power, log=True), attrgetter("bus_gb_s")),
    ]
    out: list[tuple[str, str]] = []
    for what, y, figure_of in figures:
        lines: list[Series] = []
        for name in contestants:
            values = [(size, figure_of(rows[size][name])) for size in sizes if name in rows[size]]
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
    if value >= 0.009:
        return f"{value:g}"
    return "10" + f"{math.log10(value):.0f}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _short_time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale * 0.999:
            return f"{seconds / scale:g} {unit}"
    return f"{seconds / 1e-9:g} ns"
