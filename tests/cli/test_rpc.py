"""`dure rpc top`: figures of two looks make a table."""

from io import StringIO

from rich.console import Console
from rich.text import Text

from dure.cli.rpc import table
from dure.rpc.figures import Figures, Seen


def shown(before: list[Seen], now: list[Seen], seconds: float) -> list[list[str]]:
    console = Console(file=StringIO(), width=80)
    console.print(table(before, now, seconds))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return [line.split() for line in lines[1:]]


def test_rates_are_between_two_looks_and_states_are_of_the_second():
    before = [Seen(7, "server", Figures(10, 20, 1, 1, 5_000_000, 0, 1, 1))]
    now = [Seen(7, "server", Figures(30, 120, 2, 3, 9_000_000, 2_500_000, 4, 5))]
    row = ["server", "7", "10", "50", "2", "3", "2.0", "1.2", "4", "5"]
    assert shown(before, now, 2.0) == [row]


def test_a_worker_that_came_between_two_looks_is_shown_from_its_start():
    now = [Seen(8, "late", Figures(4, 0, 0, 0, 0, 0, 0, 0))]
    assert shown([Seen(7, "late", Figures(100))], now, 2.0)[0][:3] == ["late", "8", "2"]


def test_without_workers_there_is_a_sentence():
    assert isinstance(table([], [], 1.0), Text)
