"""Tables of a report: for the terminal, and as Markdown.

The columns are those of nccl-tests, less what all rows have in common, which is in the title. Each
rival has its time, and the ratio of its time to Dure's: above 1, Dure is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from dure.cli.bench.plan import show_size
from dure.cli.bench.results import Cell, Key, Report, tables_of
from dure.cli.page import html_table

__all__ = ["html_of", "markdown", "rich_tables", "show_time"]

Row = list[str]

_OWN = ("size", "count", "time", "±", "algbw GB/s", "busbw GB/s", "#wrong")
_NONE = "-"


def show_time(seconds: float | None) -> str:
    """Write a time with a unit that suits it, to three digits."""
    if seconds is None:
        return _NONE
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:#.3g} {unit}".replace(". ", " ")
    return f"{seconds * 1e6:#.3g} us".replace(". ", " ")


def rich_tables(key: Key, cells: Sequence[Cell], contestants: Sequence[str]) -> list[Table]:
    """Return the tables of `cells`, which share `key`: Dure's figures, and beside its rivals'."""
    ((_, rows),) = tables_of(cells).items()
    names = _present(rows, contestants)
    width = len(_OWN)
    whole = _rows(rows, names)
    tables = [_table(f"{key.title}: {names[0]}", _OWN, [row[:width] for row in whole])]
    if len(names) > 1:
        heads = ["size", names[0], *_heads(names)[width:]]
        beside = [[row[0], _beside(row), *row[width:]] for row in whole]
        tables.append(_table("", heads, beside))
    return tables


def _beside(row: Row) -> str:
    """Return Dure's time as the rivals' are written."""
    return row[2] if row[2] == _NONE else f"{row[2]} ±{row[3]}"


def _table(title: str, heads: Sequence[str], rows: Sequence[Row]) -> Table:
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def html_of(cells: Sequence[Cell], contestants: Sequence[str]) -> str:
    """Return the whole table of `cells`, which belong to one operation, as HTML."""
    ((_, rows),) = tables_of(cells).items()
    names = _present(rows, contestants)
    return html_table(_heads(names), _rows(rows, names))


def markdown(report: Report) -> str:
    """Return all tables of a report as Markdown."""
    out: list[str] = []
    for key, rows in tables_of(report.cells).items():
        names = _present(rows, report.contestants)
        heads = _heads(names)
        out += [f"**{key.title}** ({names[0]})", ""]
        out += [f"| {' | '.join(heads)} |", "|" + " ---: |" * len(heads)]
        out += [f"| {' | '.join(row)} |" for row in _rows(rows, names)]
        out.append("")
    return "\n".join(out)


def _present(rows: Mapping[int, Mapping[str, Cell]], contestants: Sequence[str]) -> list[str]:
    """Return those contestants that have a cell in the table, in order."""
    return [name for name in contestants if any(name in row for row in rows.values())]


def _heads(names: Sequence[str]) -> Row:
    return [*_OWN, *(head for name in names[1:] for head in (name, "ratio"))]


def _rows(rows: Mapping[int, Mapping[str, Cell]], names: Sequence[str]) -> list[Row]:
    return [_row(rows[size], names) for size in sorted(rows)]


def _row(cells: Mapping[str, Cell], names: Sequence[str]) -> Row:
    first = next(iter(cells.values()))
    ours = cells.get(names[0])
    out = [show_size(first.num_bytes), str(first.count), *_figures(ours)]
    for name in names[1:]:
        out += _rival(cells.get(name), ours)
    return out


def _figures(cell: Cell | None) -> Row:
    """Return Dure's own columns."""
    if cell is None or cell.median_s is None:
        return [_NONE] * (len(_OWN) - 2)
    rates = (cell.algorithm_gb_s, cell.bus_gb_s)
    return [
        show_time(cell.median_s),
        f"{cell.spread:.0%}",
        *map(_show_rate, rates),
        str(cell.wrong),
    ]


def _show_rate(rate: float | None) -> str:
    """Write GB/s to three digits, and no more than three decimals."""
    if rate is None:
        return _NONE
    return f"{rate:.{3 if rate < 1 else 2 if rate < 10 else 1}f}"


def _rival(cell: Cell | None, ours: Cell | None) -> Row:
    """Return a rival's time with its spread, and how it compares."""
    if cell is None or cell.median_s is None:
        return [_NONE, _NONE]
    time = f"{show_time(cell.median_s)} ±{cell.spread:.0%}"
    if cell.wrong:
        time += f", {cell.wrong} wrong"
    if ours is None or ours.median_s is None:
        return [time, _NONE]
    ratio = cell.median_s / ours.median_s
    return [time, f"{ratio:.3g}×" if ratio < 100 else f"{ratio:.0f}×"]
