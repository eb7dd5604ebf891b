"""The command `dure`: a thin view of the library.

Subcommands are found in a table and imported when they are called, so that `dure run` does not pay
for what `dure demo` needs, and `dure --help` for neither.
"""

from __future__ import annotations

import sys

from dure.cli.app import run_command_line

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run_command_line(sys.argv[1:]))
