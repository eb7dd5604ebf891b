"""Figures of a run: medians, bandwidths, ratios; and as JSON there and back."""

import msgspec
import pytest

from dure.cli.bench.results import (
    Key,
    markdown,
    read_report,
    rich_tables,
    show_time,
    tables_of,
)
from dure.errors import DataError
from unit.bench.sample import OURS, RIVAL, cell, report


def test_cell_shows_median_spread_and_bandwidths():
    made = cell(8_000_000, OURS, 1e-3, 2e-3, 3e-3, 4e-3, 9e-3)
    assert made.median_s == 3e-3
    assert made.spread == pytest.approx(1 / 3)
    assert made.algorithm_gb_s == pytest.approx(8 / 3)
    assert made.bus_gb_s == pytest.approx(4.0)


def test_cell_without_samples_has_no_figures():
    made = cell(8, OURS)
    assert (made.median_s, made.algorithm_gb_s, made.bus_gb_s, made.spread) == (None, None, None, 0)


def test_barrier_has_a_time_and_no_bandwidth():
    made = cell(0, OURS, 1e-6, op="barrier", redop="")
    assert made.median_s == 1e-6
    assert made.bus_gb_s is None


def test_report_comes_back_from_json_and_says_medians_in_it():
    made = report()
    data = made.encode()
    assert read_report(data, "x") == made
    assert msgspec.json.decode(data)["cells"][1]["median_s"] == 500e-6


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", report().encode().replace(b"h 1", b"h 9")])
def test_what_is_no_report_is_refused(data):
    with pytest.raises(DataError):
        read_report(data, "x")


def test_wrong_cells_are_found():
    made = report()
    assert made.wrong == []
    made.cells.append(cell(8, OURS, 1e-6, wrong=3))
    assert [c.wrong for c in made.wrong] == [3]


def test_tables_sort_cells_by_operation_then_size_then_contestant():
    tables = tables_of(report().cells)
    assert list(tables) == [
        Key("all_reduce", "float32", "sum", 4),
        Key("barrier", "float32", "", 4),
    ]
    first = tables[Key("all_reduce", "float32", "sum", 4)]
    assert list(first) == [8, 1 << 20]
    assert list(first[8]) == [OURS, RIVAL]


def test_markdown_has_a_row_a_size_and_the_rival_beside_it():
    text = markdown(report())
    rows = [line for line in text.splitlines() if line.startswith("| 8 B")]
    assert rows == ["| 8 B | 2 | 2.00 us | 25% | 0.004 | 0.006 | 0 | 500 us ±20% | 250× |"]
    assert "| 1 MiB | 262144 | 1.00 ms | 0% | 1.05 | 1.57 | 0 | - | - |" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {10}


def test_terminal_shows_ours_alone_and_then_beside_rivals():
    made = report()
    cells = [c for c in made.cells if c.op == "all_reduce"]
    key = Key("all_reduce", "float32", "sum", 4)
    own, beside = rich_tables(key, cells, made.contestants)
    assert len(own.columns) == 7
    assert [c.header for c in beside.columns] == ["size", OURS, RIVAL, "ratio"]
    assert len(rich_tables(key, [c for c in cells if c.contestant == OURS], [OURS])) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (1.5e-7, "0.150 us"), (2e-6, "2.00 us"), (1.234e-3, "1.23 ms"), (120, "120 s")],
)
def test_times_are_shown_to_three_digits(seconds, text):
    assert show_time(seconds) == text
