"""A command that only starts ranks and watches them must not pay for torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["demo", "bench", "doctor"])
def test_command_is_imported_without_torch_or_scikit_learn(command):
    program = (
        f"import sys, dure.cli.{command}.command\n"
        "print([m for m in ('torch', 'sklearn') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert shown.stdout.strip() == b"[]"
