"""The command `dure`: a thin view of the library.

Subcommands are found in a table and imported when they are called, so that `dure run` does not pay
for what `dure demo` needs, and `dure --help` for neither.

Ctrl-C while they load ends the process at once: there is nothing to clean up yet, and raised in the
midst of an import the exception may be lost, or come out as another. From then on it is raised, as
in every program, until `dure run` takes it as an order to end the job.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType

__all__ = ["main"]

_CTRL_C = 128 + signal.SIGINT


def main(*words: str) -> None:
    """Run `dure WORDS` and what follows, and exit with its code; Ctrl-C is 130, as in a shell."""
    mine = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and is not ignored
    if mine:
        signal.signal(signal.SIGINT, _leave)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without our arrows is no error
        sys.stdout.reconfigure(errors="replace")
    from dure.cli.app import run_command_line  # lazy: Ctrl-C is heeded while it loads

    def loaded() -> None:
        if mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        code = run_command_line([*words, *sys.argv[1:]], loaded)
    except KeyboardInterrupt:
        _say_interrupted()
        code = _CTRL_C
    if mine:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the interpreter comes to its end
    sys.exit(code)


def _leave(number: int, frame: FrameType | None) -> None:
    _say_interrupted()
    os._exit(_CTRL_C)


def _say_interrupted() -> None:
    try:
        os.write(2, b"[dure] interrupted\n")
    except OSError:  # nobody reads it
        return
