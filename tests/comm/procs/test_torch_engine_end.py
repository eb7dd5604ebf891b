"""The end of an engine that breaks off in the middle of its work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S

PROGRAM = Path(__file__).parent / "programs" / "broken_off.py"


def test_a_gloo_group_that_is_left_in_the_middle_of_a_message_lets_its_process_end(tmp_path):
    ran = subprocess.run(
        [sys.executable, PROGRAM, tmp_path / "store"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "closed\n"), ran.stderr
