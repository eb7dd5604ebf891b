"""`dure bench`: mistakes are refused before anything starts, and figures follow from samples."""

import pytest

from dure.cli.app import run_command_line
from dure.cli.bench.command import row
from dure.cli.bench.operations import Cell, show_time


@pytest.mark.parametrize(
    "words",
    [
        *(["--sizes", text] for text in ("", "x", "0", "-8", "1.5M", "8,,9")),
        ["--op", "al_reduce"],
        ["--op", "all,reduce"],
        ["--dtype", "float31"],
        ["--ranks", "4000", "--sizes", "1G"],
        *(["--json", file] for file in ("/no/such/folder/x.json", "/tmp")),
    ],
    ids=" ".join,
)
def test_mistakes_are_one_line_and_exit_code_two(words, capfd):
    assert run_command_line(["bench", *words]) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith("dure bench: error: ")
    assert (shown.err.count("\n"), shown.out) == (1, "")


def cell(op, *samples, num_bytes=8_000_000) -> Cell:
    about = {"dtype": "float32", "ranks": 4, "count": 2, "wrong": 0}
    return Cell(op=op, num_bytes=num_bytes, samples_s=list(samples), **about)


@pytest.mark.parametrize(
    ("op", "bus_gb_s"), [("all_reduce", 4.0), ("all_gather", 2.0), ("broadcast", 8 / 3)]
)
def test_figures_follow_from_samples_and_the_convention_of_four_ranks(op, bus_gb_s):
    found = cell(op, 1e-3, 2e-3, 3e-3, 4e-3, 9e-3).figures()
    assert found == pytest.approx(
        {"median_s": 3e-3, "spread": 1 / 3, "algorithm_gb_s": 8 / 3, "bus_gb_s": bus_gb_s}
    )


def test_a_row_has_units_and_dashes_where_there_are_no_bytes():
    sized = ("1 MiB", "2", "2.00 ms", "25%", "0.524", "0.786", "0")
    assert row(cell("all_reduce", 1e-3, 2e-3, 3e-3, num_bytes=1 << 20)) == sized
    nothing = ("0 B", "2", "1.00 us", "0%", "-", "-", "0")
    assert row(cell("barrier", 1e-6, 1e-6, num_bytes=0)) == nothing
    assert [show_time(s) for s in (1.5e-7, 1.234e-3, 120)] == ["0.150 us", "1.23 ms", "120 s"]
