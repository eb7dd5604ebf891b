"""The report of `dure plan layouts`: one HTML file with pictures, tables and reasons."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from dure.cli import charts
from dure.cli.charts import Axis, Bar, Dots, scatter_chart, stacked_bars
from dure.cli.plan_advice import code, command
from dure.errors import UsageError
from dure.plan import Plan, Row
from dure.plan.layouts import STRATEGIES
from dure.plan.planning import usable

__all__ = ["PARTS", "shares", "short", "too_large", "write_report"]

PARTS = {
    "compute": ("products", "attention", "elementwise", "ends"),
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "messages": ("messages",),
    "bubble": ("bubble",),
    "optimizer": ("optimizer",),
    "host": ("launches",),
}
"""Where the time of a step goes, as it is shown, with the terms that each adds up."""

_TOO_LARGE = 3
_BARS, _TABLE = 10, 15
_FURTHEST = 2.5  # times a GPU's memory: what takes more is not drawn
_COLOURS = {
    "c0": ("#1769c2", "#5aa4ee"),
    "c1": ("#d9722b", "#ee9a5c"),
    "c2": ("#2f8f63", "#62bd90"),
    "c3": ("#8b5bbf", "#b893e3"),
    "c4": ("#b08a1e", "#d8b552"),
    "c5": ("#b9bec6", "#6b7178"),
    "p0": ("#b9bec6", "#6b7178"),
    "p1": ("#1769c2", "#4a93dd"),
    "p2": ("#7fb0e3", "#9cc5ef"),
    "p3": ("#e07b39", "#ea9458"),
    "p4": ("#8b5bbf", "#b893e3"),
    "p5": ("#c9a227", "#d8b552"),
    "p6": ("#5b9e6f", "#74b588"),
    "p7": ("#b5484a", "#d97779"),
}
_STYLE = """
body { max-width: 1400px; }
td { font-size: 14px; }
td:last-child { font-weight: inherit; }
section p { overflow-wrap: anywhere; }
section p + p { margin-top: 8px; }
pre { margin: 0; overflow-x: auto; font-size: 13px; }
"""


def write_report(path: Path, found: Plan, title: str) -> None:
    """Write the page of a plan.

    Raises:
        UsageError: The file cannot be written.
    """
    first = found.rows[0]
    speed = f"{first.speed:,.0f} tokens/s, between {short(first.low)} and {short(first.high)}"
    lines = f"{code(first.layout, found.job, found.machine)}\n\n$ {command(found.machine)}"
    changes = [f"{c.text}: {c.layout}, {c.speed:,.0f} tokens/s" for c in found.changes]
    blocks = [
        charts.side_by_side([_bars(found), _dots(found)]),
        charts.side_by_side([charts.section(_rows(found), "Layouts that fit, fastest first")]),
        charts.side_by_side([charts.section(_memory(found), "GB of the fullest rank")]),
        charts.side_by_side([_sentences("Why", found.reasons)]),
        charts.side_by_side(
            [
                _sentences("Faster, but too large", too_large(found)),
                _sentences("Another layout is the fastest", changes),
                _sentences("Note", found.warnings),
            ]
        ),
        charts.side_by_side([charts.section(f"<pre>{escape(lines)}</pre>", str(first.layout))]),
    ]
    text = charts.page(
        "dure plan layouts", f"{first.layout}: {speed}", title, _COLOURS, blocks, _STYLE
    )
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError("the report cannot be written", seen=str(error)) from None


def shares(row: Row) -> dict[str, float]:
    """Return what part of a step goes where, as it is shown."""
    return {
        name: sum(row.time[part] for part in parts) / row.seconds for name, parts in PARTS.items()
    }


def too_large(found: Plan) -> list[str]:
    """Return a sentence for each of the first layouts that do not fit."""
    first, room = found.rows[0], usable(found.machine) / 1e9
    return [
        f"{row.layout}: {row.speed / first.speed - 1:.0%} faster; {row.peak / 1e9:.1f} GB are "
        f"{row.peak / 1e9 - room:.1f} too many"
        for row in [r for r in found.too_large if r.peak / 1e9 <= _FURTHEST * room][:_TOO_LARGE]
    ]


def short(number: float) -> str:
    """Write a number with three digits: 186k, 1.02M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _sentences(title: str, texts: Sequence[str]) -> str:
    return charts.section("".join(f"<p>{escape(t)}</p>" for t in texts), title) if texts else ""


def _bars(found: Plan) -> str:
    rows = found.rows[:_BARS]
    unit, scale = ("ms", 1e3) if rows[0].seconds < 2 else ("s", 1.0)
    bars = [
        Bar(str(i), [share * row.seconds * scale for share in shares(row).values()])
        for i, row in enumerate(rows, 1)
    ]
    title = "Where the time of a step goes"
    return charts.figure(title, stacked_bars(title, list(PARTS), bars, Axis(f"a step ({unit})")))


def _dots(found: Plan) -> str:
    """Draw memory against speed: a point for each mesh, coloured by what its ranks share."""
    edge = usable(found.machine) / 1e9

    def points(rows: Sequence[Row]) -> list[tuple[float, float, str]]:
        near = [row for row in rows if row.peak / 1e9 <= _FURTHEST * edge]
        return [(row.peak / 1e9, row.speed, str(row.layout)) for row in near]

    series = [
        Dots(name, points([row for row in found.rows if row.layout.strategy == name]))
        for name in STRATEGIES
    ]
    title = "Memory against speed (dashed: what is usable)"
    x, y = Axis("GB of the fullest rank"), Axis("tokens/s", short)
    all_of_them = [*series, Dots("too large", points(found.too_large))]
    return charts.figure(title, scatter_chart(title, all_of_them, x, y, edge))


def _rows(found: Plan) -> str:
    heads = ["", "tokens/s", "8 of 10 within", "MFU", "GB", *PARTS]
    rows: list[list[str]] = []
    for i, row in enumerate(found.rows[:_TABLE], 1):
        cells = [f"{row.speed:,.0f}", f"{short(row.low)} to {short(row.high)}"]
        cells += [f"{row.mfu:.0%}", f"{row.peak / 1e9:.1f}"]
        cells += [f"{share:.0%}" if share >= 0.005 else "-" for share in shares(row).values()]
        rows.append([f"{i}  {row.layout}", *cells])
    return charts.html_table(heads, rows)


def _memory(found: Plan) -> str:
    heads = ["", *found.rows[0].memory, "together"]
    rows = [
        [
            f"{i}  {row.layout}",
            *(f"{size / 1e9:.1f}" for size in row.memory.values()),
            f"{row.peak / 1e9:.1f}",
        ]
        for i, row in enumerate(found.rows[:_BARS], 1)
    ]
    return charts.html_table(heads, rows)
