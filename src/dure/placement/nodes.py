"""Lists of hosts and of counts, as Slurm writes them: "node[1-3,07],login" and "4(x2),1".

Written as a grammar, a list of hosts is

    list  = part ("," part)*              commas inside brackets do not part
    part  = text ("[" range,... "]" text)*
    range = digits | digits "-" digits    as wide as its first number, zeros included

and a part means every combination of its ranges, the last one running fastest. Slurm hands such
lists to every task; the library that reads them elsewhere (ClusterShell) is an extra of the command
line that a rank need not have.
"""

from __future__ import annotations

import itertools
import re

__all__ = ["expand_counts", "expand_hosts"]

MOST_HOSTS = 100_000
"""A list that means more is a mistake, or an attack on our memory."""

_PART = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(,|\Z)")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a list, in order.

    Raises:
        ValueError: The list is malformed, or a range has more than 100,000 numbers.
    """
    out: list[str] = []
    position, comma = 0, ","
    while comma:
        found = _PART.match(text, position)
        if found is None or not found[1].strip():
            raise ValueError(f"no list of hosts: {text[position : position + 80]!r}")
        position, comma = found.end(), found[2]
        pieces = _BRACKETS.split(found[1].strip())
        choices = [_numbers(piece) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        out += ["".join(names) for names in itertools.product(*choices)]
    return tuple(out)


def _numbers(ranges: str) -> list[str]:
    out: list[str] = []
    for text in ranges.split(","):
        found = _RANGE.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is neither a number nor a range")
        first, last = found[1], found[2] or found[1]
        if not 0 <= int(last) - int(first) < MOST_HOSTS - len(out):
            raise ValueError(f"the range {text!r} ends before it begins, or is too long")
        out += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return out


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of "4(x2),1", here 4, 4 and 1: one per host.

    Raises:
        ValueError: The list is malformed, or means more than 100,000 numbers.
    """
    out: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{part!r} is neither a number nor one like 4(x2)")
        times = int(found[2] or 1)
        if times + len(out) > MOST_HOSTS:
            raise ValueError(f"more than {MOST_HOSTS} hosts in {text!r}")
        out += [int(found[1])] * times
    return tuple(out)
