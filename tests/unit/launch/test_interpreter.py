"""Which of an interpreter's options ranks get."""

from __future__ import annotations

import pytest

from dure.launch.interpreter import handed_on

LINES = {
    "python -m dure.run": "",
    "python -O -m dure.run -W": "-O",
    "python -OOB train.py -d": "-O -O -B",
    "python -X dev -Werror::UserWarning -c 0": "-X dev -W error::UserWarning",
    "python -bdvR -Ximporttime - -O": "-b -d -v -R -X importtime",
    "python -OWignore -m dure.run": "-O -W ignore",
    "python -IPEsSiqu -B dure": "-B",
    "python --check-hash-based-pycs always -O x": "--check-hash-based-pycs always -O",
    "python -BmO dure": "-B",
    "python -Bc pass": "-B",
    "uwsgi --module app -O": "",
    "server -y 3 -O": "",
    "python -X": "",
    "python": "",
    "": "",
}


@pytest.mark.parametrize("line", LINES)
def test_options_that_say_how_code_runs_are_handed_on(line: str) -> None:
    assert handed_on(line.split()[1:]) == tuple(LINES[line].split())
