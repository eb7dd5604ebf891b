"""The results of a benchmark: values, the figures derived from them, and their tables.

A *cell* is one operation at one size, by one contestant. A sample is the time of one operation in
seconds, mean over several back to back, of the rank that took longest. Shown is the median of the
samples; the *spread* is half the distance between the quartiles, relative to the median.

The columns of tables are those of nccl-tests, without what all rows have in common, which is in
the title. Each other library has its time, and the ratio to Dure's: above 1, Dure is faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from rich import box
from rich.table import Table

from compared.plan import Plan
from dure.cli.bench.operations import OPERATIONS, show_size, show_time
from dure.errors import DataError

FORMAT = "dure bench 1"
"""Of the files of `--json`."""
_OWN = ["size", "count", "time", "±", "algbw GB/s", "busbw GB/s", "#wrong"]
_NONE = "-"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One operation at one size, by one contestant.

    Attributes:
        redop: Of its reduction; empty where it has none.
        num_bytes: Of the buffer, as `plan` counts it; 0 for a barrier.
        samples_s: The samples; none where it was not measured.
        wrong: Elements that differed from what they must be, of all ranks and both checks.
        note: Why it was not measured.
    """

    op: str
    dtype: str
    redop: str
    ranks: int
    num_bytes: int
    count: int
    contestant: str
    samples_s: tuple[float, ...] = ()
    wrong: int = 0
    note: str = ""

    @property
    def key(self) -> Key:
        return Key(self.op, self.dtype, self.redop, self.ranks)

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.samples_s) if self.samples_s else None

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median; 0.05 is 5 percent."""
        if len(self.samples_s) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return (high - low) / 2 / middle

    @property
    def algorithm_gb_s(self) -> float | None:
        """Bytes of size per second, in 10^9."""
        return self.num_bytes / self.median_s / 1e9 if self.median_s and self.num_bytes else None

    @property
    def bus_gb_s(self) -> float | None:
        rate = self.algorithm_gb_s
        return rate * OPERATIONS[self.op].bus_factor(self.ranks) if rate is not None else None


class Report(msgspec.Struct, kw_only=True):
    """A whole run: on what, of what, and what came out; `contestants` begin with Dure."""

    format: str = FORMAT
    command: str
    when: str
    machine: dict[str, str]
    versions: dict[str, str]
    plan: Plan
    contestants: list[str] = []
    cells: list[Cell] = []

    @property
    def wrong(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.wrong]

    def encode(self) -> bytes:
        """Return the report as JSON that people can read; medians are in it for their sake."""
        plain = msgspec.to_builtins(self)
        for record, cell in zip(plain["cells"], self.cells, strict=True):
            record["median_s"], record["spread"] = cell.median_s, round(cell.spread, 4)
            record["algorithm_gb_s"], record["bus_gb_s"] = cell.algorithm_gb_s, cell.bus_gb_s
        return msgspec.json.format(msgspec.json.encode(plain), indent=1) + b"\n"


class Key(msgspec.Struct, frozen=True, order=True):
    """What the cells of one table have in common."""

    op: str
    dtype: str
    redop: str
    ranks: int

    @property
    def title(self) -> str:
        op = f"{self.op} ({self.redop})" if self.redop else self.op
        kind = "" if self.op == "barrier" else f", {self.dtype}"
        return f"{op}{kind}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"


def tables_of(cells: Iterable[Cell]) -> dict[Key, dict[int, dict[str, Cell]]]:
    """Sort cells into tables: rows by size, and in a row the contestants."""
    tables: dict[Key, dict[int, dict[str, Cell]]] = {}
    for cell in cells:
        tables.setdefault(cell.key, {}).setdefault(cell.num_bytes, {})[cell.contestant] = cell
    return tables


def read_report(data: bytes, name: str) -> Report:
    """Decode what `Report.encode` wrote.

    Raises:
        DataError: It is something else; `name` is what the message calls it.
    """
    try:
        report = msgspec.json.decode(data, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            f"{name} is not a report of benchmarks/collectives.py", seen=str(error)
        ) from error
    if report.format != FORMAT:
        raise DataError(f"{name} is a report of another format", seen=report.format)
    return report


def rich_table(key: Key, cells: Sequence[Cell], contestants: Sequence[str]) -> Table:
    """Return the table of `cells`, which share `key`: Dure's figures, then those of the others."""
    heads, rows = heads_and_rows(tables_of(cells)[key], contestants)
    ours = next(name for name in contestants if any(c.contestant == name for c in cells))
    table = Table(
        title=f"{key.title}: {ours}",
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
    if cell is None or cell.median_s is None:
        return [_NONE, _NONE]
    time = f"{show_time(cell.median_s)} ±{cell.spread:.0%}"
    if cell.wrong:
        time += f", {cell.wrong} wrong"
    if ours is None or ours.median_s is None:
        return [time, _NONE]
    ratio = cell.median_s / ours.median_s
    return [time, f"{ratio:.3g}×" if ratio < 100 else f"{ratio:.0f}×"]
