"""The programs of docs/debugging.md fail as the page says, at the lines that it shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import snippets
from tests.waiting import PATIENCE_S

PAGE = (snippets.ROOT / "docs" / "debugging.md").read_text()
PROGRAM = re.compile(
    r"Write `(\w+\.py)`:\n\n<!-- not run: [^\n]*-->\n```python\n(.*?)^```$", re.M | re.S
)
PROGRAMS = dict(PROGRAM.findall(PAGE))
FAILURES = {
    "evaluate.py": ("dure.errors.Desync: ", 1),
    "blocked.py": ("dure.errors.CommTimeout: rank 1 did not arrive", 1),
    "killed.py": ("dure.errors.PeerLost: the process of rank 1 ended", 137),
}


@pytest.mark.parametrize("name", FAILURES)
def test_program_of_the_page_fails_at_the_lines_shown(name: str, tmp_path: Path) -> None:
    error, code = FAILURES[name]
    (tmp_path / name).write_text(PROGRAMS[name])
    done = subprocess.run(
        [sys.executable, "-m", "dure.run", "--nproc", "2", "--no-fold", name],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == code, done.stdout
    assert error in done.stdout
    lines = set(re.findall(rf"\b{name}:\d+", PAGE))
    assert lines <= set(re.findall(rf"\b{name}:\d+", done.stdout)), done.stdout


def test_every_failing_program_is_run() -> None:
    assert set(FAILURES) == set(PROGRAMS)
