"""The demo's parent process starts the ranks and watches them: it must not pay for torch."""

import subprocess
import sys


def test_demo_command_is_imported_without_torch_or_scikit_learn():
    program = (
        "import sys, dure.cli.demo.command\n"
        "print([m for m in ('torch', 'sklearn') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert shown.stdout.strip() == b"[]"
