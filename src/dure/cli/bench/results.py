"""What a benchmark found: values, and the figures derived from them. Times are seconds.

A *cell* is one operation at one size, by one contestant. A sample is the time of one operation,
mean over several back to back, of the rank that took longest. Shown is the median of the samples;
the *spread* is half the distance between the quartiles, relative to the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec

from dure.cli.bench.plan import OPERATIONS, Plan
from dure.errors import DataError

__all__ = ["Cell", "Key", "Report", "read_report", "tables_of"]

FORMAT = "dure bench 1"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One operation at one size, by one contestant.

    Attributes:
        op: The operation.
        dtype: Of its elements.
        redop: Of its reduction; empty where it has none.
        ranks: Size of the group.
        num_bytes: Of the buffer, as `operations` counts it; 0 for a barrier.
        count: Elements of it.
        contestant: Who; as in `Report.contestants`.
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
        """Whose table it belongs to."""
        return Key(self.op, self.dtype, self.redop, self.ranks)

    @property
    def median_s(self) -> float | None:
        """The figure to show; None where it was not measured."""
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
        """Algorithm bandwidth times the operation's factor."""
        rate = self.algorithm_gb_s
        return rate * OPERATIONS[self.op].bus_factor(self.ranks) if rate is not None else None


class Report(msgspec.Struct, kw_only=True):
    """A whole run: on what, of what, and what came out.

    Attributes:
        format: Tells such a file from others.
        command: The command line, with every option spelled out.
        when: Local date and time.
        machine: Processor, cores, memory, kernel.
        versions: Of Dure, Python and torch, and of each rival.
        plan: What was asked.
        contestants: Names, Dure first.
        cells: Everything measured.
    """

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
        """The cells with wrong results."""
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
        """What the table is called."""
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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{name} is no report of dure bench", seen=str(error)) from error
    if report.format != FORMAT:
        raise DataError(f"{name} is of another version", seen=report.format)
    return report
