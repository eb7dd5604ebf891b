"""Figures of a run: medians, bandwidths, ratios; as JSON there and back, as tables."""

import msgspec
import pytest

from dure.cli.bench.results import Key, markdown, read_report, rich_table, show_time
from dure.errors import DataError
from tests.cli.bench.bench_sample import OURS, RIVAL, cell, report


def test_cell_shows_median_spread_and_bandwidths():
    made = cell(8_000_000, OURS, 1e-3, 2e-3, 3e-3, 4e-3, 9e-3)
    assert made.median_s == 3e-3
    assert made.spread == pytest.approx(1 / 3)
    assert made.algorithm_gb_s == pytest.approx(8 / 3)


@pytest.mark.parametrize(
    ("op", "bus_gb_s"), [("all_reduce", 1.5), ("all_gather", 0.75), ("broadcast", 1.0)]
)
def test_bus_bandwidth_of_four_ranks_follows_the_convention(op, bus_gb_s):
    assert cell(1_000_000, OURS, 1e-3, op=op).bus_gb_s == pytest.approx(bus_gb_s)


def test_cell_without_samples_or_bytes_has_no_bandwidth():
    made = cell(8, OURS)
    assert (made.median_s, made.algorithm_gb_s, made.bus_gb_s, made.spread) == (None, None, None, 0)
    assert cell(0, OURS, 1e-6, op="barrier", redop="").bus_gb_s is None


def test_report_comes_back_from_json_and_says_medians_in_it():
    made = report()
    data = made.encode()
    assert read_report(data, "x") == made
    assert msgspec.json.decode(data)["cells"][1]["median_s"] == 500e-6


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        (b"", ""),
        (b"{}", ""),
        (b"[1]", ""),
        (report().encode().replace(b"h 1", b"h 9"), "pip install 'dure>=0.2'"),
        (report().encode().replace(b"h 1", b"h 0"), "does not read older formats"),
    ],
)
def test_other_files_and_formats_are_refused(data, fix):
    with pytest.raises(DataError) as caught:
        read_report(data, "x")
    assert fix in caught.value.fix
    assert bool(fix) is bool(caught.value.fix)


def test_markdown_has_a_row_a_size_and_the_rival_beside_it():
    lines = markdown(report()).splitlines()
    assert [line for line in lines if line[:3] in {"**a", "**b", "| 8", "| 1", "| 0"}] == [
        "**all_reduce (sum), float32, 4 ranks** (dure shm)",
        "| 8 B | 2 | 2.00 us | 25% | 0.004 | 0.006 | 0 | 500 us ±20% | 250× |",
        "| 1 MiB | 262144 | 1.00 ms | 0% | 1.05 | 1.57 | 0 | - | - |",
        "**barrier, 4 ranks** (dure shm)",
        "| 0 B | 0 | 1.00 us | 0% | - | - | 0 | 5.00 us ±0% | 5× |",
    ]


def test_terminal_shows_ours_and_the_others_beside_it():
    made = report()
    cells = [c for c in made.cells if c.op == "all_reduce"]
    key = Key("all_reduce", "float32", "sum", 4)
    own = ["size", "count", "time", "±", "algbw GB/s", "busbw GB/s", "#wrong"]
    table = rich_table(key, cells, made.contestants)
    assert [c.header for c in table.columns] == [*own, RIVAL, "ratio"]
    alone = rich_table(key, [c for c in cells if c.contestant == OURS], [OURS])
    assert [c.header for c in alone.columns] == own


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (1.5e-7, "0.150 us"), (2e-6, "2.00 us"), (1.234e-3, "1.23 ms"), (120, "120 s")],
)
def test_times_are_shown_to_three_digits(seconds, text):
    assert show_time(seconds) == text
