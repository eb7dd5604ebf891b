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


@pytest.mark.parametrize("module", ["dure", "dure.run", "dure.launch"])
def test_modules_that_torch_users_would_start_are_the_command(module):
    words = [] if module != "dure" else ["run"]
    wrong = [sys.executable, "-m", module, *words, "--nproc", "x", "train.py"]
    shown = subprocess.run(wrong, capture_output=True, check=False)
    assert shown.returncode == 2
    assert shown.stderr.startswith(b"dure run: error: ")
