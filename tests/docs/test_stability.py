"""docs/stability.md: the numbers of formats are those of the code."""

import importlib
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "stability.md"
ROW = re.compile(r"^\| ([^|]+) \| (\d+) \(`([\w.]+)\.VERSION`\) \|", re.MULTILINE)


def test_numbers_of_formats_are_those_of_the_code():
    rows = ROW.findall(PAGE.read_text())
    assert len(rows) == 6
    for file, number, module in rows:
        assert int(number) == importlib.import_module(module).VERSION, file
