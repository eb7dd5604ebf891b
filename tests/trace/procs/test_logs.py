"""An invalid value of DURE_LOG is reported once, by the error of the start or at the end."""

import os
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

START = "dure.init_process_group('fake', rank=0, world_size=1)"
CHANGED = f"import os; os.environ['DURE_LOG'] = 'info'; {START}"


@pytest.mark.parametrize(
    ("program", "code", "reports"),
    [
        (START, 1, 1),
        ("", 0, 1),
        (CHANGED, 0, 0),
    ],
    ids=["refused", "no ranks", "changed by the program"],
)
def test_an_invalid_level_is_reported_once(program: str, code: int, reports: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import dure, dure.store.router\n{program}"],
        env={**os.environ, "DURE_LOG": "loud"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr.count("DURE_LOG must be")) == (code, reports)
