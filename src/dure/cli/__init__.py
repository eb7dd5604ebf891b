"""The command `dure`: a thin view of the library.

Subcommands are found in a table and imported when they are called, so that `dure run` does not pay
for what `dure demo` needs, and `dure --help` for neither.

Ctrl-C during these imports ends the process at once: there is nothing to clean up yet, and an
exception raised inside an import may be lost, or come out as another. After them it is raised, as
in every program, until `dure run` handles it as the order to end the job.

If the output has no reader any more (`dure env | head -1`), the command ends silently, with the
exit code of a program that SIGPIPE has ended. If it cannot be written (a full disk), that is one
line, and exit code 1.

Internal: programs start `dure` as a command.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
from types import FrameType

__all__ = ["main"]

_CTRL_C = 128 + signal.SIGINT


def main(*words: str, args: list[str] | None = None) -> None:
    """Run `dure WORDS` with `args`, or those of the command line, and exit with its code.

    Ctrl-C is 130, as in a shell.
    """
    mine = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and is not ignored
    if mine:
        signal.signal(signal.SIGINT, _leave)
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # for terminals without our arrows
        sys.stdout.reconfigure(errors="replace")
    from dure.cli import app  # lazy: Ctrl-C already works here

    def loaded() -> None:
        if mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        code = app.run_command_line([*words, *(sys.argv[1:] if args is None else args)], loaded)
        if isinstance(sys.stdout, io.TextIOBase):  # None if a shell has closed it
            sys.stdout.flush()
    except KeyboardInterrupt:
        _print_interrupted()
        code = _CTRL_C
    except BrokenPipeError:
        if not _is_unread():
            raise
        code = app.UNREAD_EXIT_CODE
    except OSError as error:
        if not _is_unwritten():
            raise
        print(f"dure: error: the output cannot be written: {error.strerror}", file=sys.stderr)
        code = 1
    if mine:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the interpreter exits
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open /dev/null for standard streams that are closed: else pipes would get their numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _leave(number: int, frame: FrameType | None) -> None:
    _print_interrupted()
    os._exit(_CTRL_C)


def _is_unread() -> bool:
    """Return whether our output has no reader any more; then the rest of it is discarded."""
    out = select.poll()
    for fd in (1, 2):
        out.register(fd, 0)
    unread = [fd for fd, events in out.poll(0) if events & select.POLLERR]
    for fd in unread:
        _discard(fd)
    return bool(unread)


def _is_unwritten() -> bool:
    """Return whether our output cannot be written; then the rest of it is discarded."""
    if not isinstance(sys.stdout, io.TextIOBase):  # a shell has closed it
        return False
    try:
        sys.stdout.flush()  # what failed is still in the buffer
        os.write(1, b"\n")
    except OSError:
        _discard(1)
        return True
    return False


def _discard(fd: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def _print_interrupted() -> None:
    with contextlib.suppress(OSError):  # the output is closed
        os.write(2, b"[dure] interrupted\n")
