"""The command `dure`: a thin view of the library.

Subcommands are found in a table and imported when they are called, so that `dure run` does not pay
for what `dure demo` needs, and `dure --help` for neither.
"""

from __future__ import annotations

import io
import sys

__all__ = ["main"]

_CTRL_C = 130  # 128 + SIGINT; `signal` takes long to import, and nobody guards that from Ctrl-C


def main(*words: str) -> None:
    """Run `dure WORDS` and what follows, and exit with its code; Ctrl-C is 130, as in a shell."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without our arrows is no error
        sys.stdout.reconfigure(errors="replace")
    try:
        from dure.cli.app import run_command_line  # lazy: Ctrl-C while it loads

        sys.exit(run_command_line([*words, *sys.argv[1:]]))
    except KeyboardInterrupt:
        sys.exit(_CTRL_C)
