"""The interpreter's own options, which a launcher passes on to the ranks that it starts.

`python -O -X dev -W error -m dure.run train.py` means the program, not the launcher. So options
that say how code runs are repeated before each rank's program, as `multiprocessing` repeats them
for its children. Left out are those that say where modules come from (-E, -I, -P, -s, -S):
distributions put them into the first line of an installed `dure`, and a program must find the files
beside it anyway.
"""

from __future__ import annotations

import sys

__all__ = ["interpreter_options"]


def interpreter_options() -> tuple[str, ...]:
    """Return the options of this process's interpreter that ranks get as well."""
    flags = sys.flags
    counted = {
        "-b": flags.bytes_warning,
        "-B": flags.dont_write_bytecode,
        "-d": flags.debug,
        "-O": flags.optimize,
        "-v": flags.verbose,
    }
    options = [option for option, count in counted.items() for _ in range(count)]
    for name, value in sys._xoptions.items():  # pyright: ignore[reportPrivateUsage]
        options += ["-X", name if value is True else f"{name}={value}"]
    for warning in sys.warnoptions:
        options += ["-W", warning]
    return tuple(options)
