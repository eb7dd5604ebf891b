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

__all__ = ["heads_and_rows", "markdown", "rich_tables", "show_time"]

_OWN = ["size", "count", "time", "±", "algbw GB/s", "busbw GB/s", "#wrong"]
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
    heads, rows = heads_and_rows(tables_of(cells)[key], contestants)
    own = len(_OWN)
    ours = next(name for name in contestants if any(c.contestant == name for c in cells))
    tables = [_rich(f"{key.title}: {ours}", heads[:own], [row[:own] for row in rows])]
    if len(heads) > own:
        beside = [
            [row[0], row[2] if row[2] == _NONE else f"{row[2]} ±{row[3]}", *row[own:]]
            for row in rows
        ]
        tables.append(_rich("", ["size", ours, *heads[own:]], beside))
    return tables


def _rich(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
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


def markdown(report: Report) -> str:
    """Return all tables of a report as Markdown."""
    out: list[str] = []
    for key, found in tables_of(report.cells).items():
        heads, rows = heads_and_rows(found, report.contestants)
        ours = next(name for name in report.contestants if any(name in c for c in found.values()))
        out += [f"**{key.title}** ({ours})", ""]
        out += [f"| {' | '.join(heads)} |", "|" + " ---: |" * len(heads)]
        out += [f"| {' | '.join(row)} |" for row in rows]
        out.append("")
    return "\n".join(out)


def heads_and_rows(
    rows: Mapping[int, Mapping[str, Cell]], contestants: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Return the whole table of what `tables_of` found for one operation, as texts."""
    names = [name for name in contestants if any(name in row for row in rows.values())]
    heads = [*_OWN, *(head for name in names[1:] for head in (name, "ratio"))]
    return heads, [_row(rows[size], names) for size in sorted(rows)]


def _row(cells: Mapping[str, Cell], names: Sequence[str]) -> list[str]:
    first, ours = next(iter(cells.values())), cells.get(names[0])
    out = [show_size(first.num_bytes), str(first.count)]
    if ours is None or ours.median_s is None:
        out += [_NONE] * (len(_OWN) - 2)
    else:
        rates = [_show_rate(rate) for rate in (ours.algorithm_gb_s, ours.bus_gb_s)]
        out += [show_time(ours.median_s), f"{ours.spread:.0%}", *rates, str(ours.wrong)]
    for name in names[1:]:
        out += _rival(cells.get(name), ours)
    return out


def _show_rate(rate: float | None) -> str:
    """Write GB/s to three digits, and no more than three decimals."""
    if rate is None:
        return _NONE
    return f"{rate:.{3 if rate < 1 else 2 if rate < 10 else 1}f}"


def _rival(cell: Cell | None, ours: Cell | None) -> list[str]:
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
