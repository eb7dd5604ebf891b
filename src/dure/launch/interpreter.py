"""The interpreter's own options, which a launcher passes on to the ranks that it starts.

`python -O -X dev -W error -m dure.run train.py` means the program, not the launcher. So options
that say how code runs are repeated before each rank's program, as `multiprocessing` repeats them
for its children. Left out are those that say where modules come from: distributions put them into
the first line of an installed `dure`, and a program must find the files beside it anyway.
"""

from __future__ import annotations

import subprocess

__all__ = ["interpreter_options"]

_WHERE = ("-E", "-I", "-P", "-s", "-S")


def interpreter_options() -> tuple[str, ...]:
    """Return the options of this process's interpreter that ranks get as well."""
    options = subprocess._args_from_interpreter_flags()  # pyright: ignore
    return tuple(option for option in options if option not in _WHERE)
