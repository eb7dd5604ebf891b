"""What a process prints that ends without leaving its groups."""

import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S

PROGRAM = Path(__file__).parent / "programs/daemons_at_exit.py"


def run(*args: object) -> str:
    """Return what the program prints to standard error."""
    command = [sys.executable, PROGRAM, *map(str, args)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0
    return ended.stderr


def test_groups_that_are_left_at_exit_print_only_what_threads_raise(tmp_path: Path) -> None:
    printed = run(tmp_path / "meeting")
    assert printed.count("KeyError: 'of the program'") == 1
    assert printed.count("Traceback") == 2  # and that of the thread whose group was left
    assert "Exception ignored" not in printed


def test_a_group_that_was_never_made_is_destroyed_at_exit_without_noise(tmp_path: Path) -> None:
    assert run(tmp_path / "meeting", "early") == ""
