"""`dure plan`: schedules beside each other, a grid and a picture of the chosen one."""

import pytest

from dure.schedules import make_schedule, write_csv
from tests.cli.planned import called


def test_all_schedules_are_compared_and_the_chosen_one_is_marked(tmp_path):
    words = ["--schedule", "1f1b", "--stages", "4", "--microbatches", "8"]
    code, out, _ = called("pipeline", *words, "--svg", str(tmp_path / "a.svg"), columns=200)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert "* 1f1b 4 33 27.3% 4" in lines  # (8 + 3) * 3, of which 24 are work
    assert "interleaved-1f1b 8 28.5 15.8% 5.5" in lines
    assert "rank 0 F0 F1 F2 F3" in out.replace("   ", " ")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    write_csv(make_schedule("1f1b", stages=4, microbatches=8, ranks=4), tmp_path / "a.csv")
    _, out, _ = called("pipeline", "--schedule", str(tmp_path / "a.csv"))
    assert "* a 4 33 27.3% 4" in " ".join(out.split())


def test_times_may_be_given():
    words = ["--schedule", "1f1b", "--stages", "2", "--microbatches", "1", "--times", "F=2,B=5"]
    assert "* 1f1b 2 14 50.0% 1" in " ".join(called("pipeline", *words)[1].split())
    _, out, _ = called("pipeline", *words, "--send", "1")
    assert "* 1f1b 2 16 56.2% 1" in " ".join(out.split())


@pytest.mark.parametrize(
    "words",
    [
        ["--schedule", "1f1b", "--stages", "4"],
        ["--schedule", "nothing", "--stages", "4", "--microbatches", "4"],
        ["--stages", "4", "--microbatches", "4", "--times", "F=1,B"],
        ["--stages", "4", "--microbatches", "4", "--times", "F=-1"],
        ["--stages", "4", "--microbatches", "4", "--times", "F=inf"],
        ["--stages", "4", "--microbatches", "4", "--svg", "/nowhere/a.svg"],
        ["--stages", "4", "--microbatches", "4", "--ranks", "3"],
        ["--stages", "4", "--schedule", "own.csv"],
    ],
)
def test_what_is_wrong_is_one_line(words):
    code, out, err = called("pipeline", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dure plan: error: ")
