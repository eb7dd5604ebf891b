"""The interpreter's own options, which a launcher hands on to the ranks that it starts.

`python -O -X dev -W error -m dure.run train.py` means the program, not the launcher. So options
that say how code runs (-b, -B, -d, -O, -R, -v, -W, -X, --check-hash-based-pycs) are repeated before
each rank's program, as `multiprocessing` repeats them for its children. Left out are those that say
where modules come from (-E, -I, -P, -s, -S): distributions put them into the first line of an
installed `dure`, and a program must find the files beside it all the same; and what concerns the
launcher's terminal alone (-i, -q, -u, -x).

They are read from the command line as it was given. What PYTHONOPTIMIZE and its like say reaches
the ranks as variables, and a rank may be given others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["handed_on", "interpreter_options"]

_PLAIN = frozenset("bBdORv")
_WITH_VALUE = frozenset("WX")
_DROPPED = frozenset("EIPsSiqux")
_CHECK_PYCS = "--check-hash-based-pycs"


def interpreter_options() -> tuple[str, ...]:
    """Return the options of this process's interpreter that ranks get as well."""
    return handed_on(sys.orig_argv[1:])


def handed_on(words: Sequence[str]) -> tuple[str, ...]:
    """Return those options of a Python command line that ranks get, one word or two each.

    Args:
        words: The command line after the interpreter. Reading ends at the program, and at what no
            Python knows, for then another program holds this interpreter.
    """
    out: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if word.startswith("--"):
            if word != _CHECK_PYCS or not rest:
                break
            out += [word, rest.pop(0)]
        elif not _cluster(word[1:], rest, out):
            break
    return tuple(out)


def _cluster(letters: str, rest: list[str], out: list[str]) -> bool:
    """Read one word such as -OBWerror; return False where the options end."""
    for at, letter in enumerate(letters, 1):
        if letter in _WITH_VALUE:
            value = letters[at:] or (rest.pop(0) if rest else "")
            out += [f"-{letter}", value] if value else []
            return bool(value)
        if letter in _PLAIN:
            out.append(f"-{letter}")
        elif letter not in _DROPPED:
            return False
    return True
