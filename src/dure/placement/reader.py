"""Reading variables, and keeping what was read: from where, and what could not be understood."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from dure.placement.nodes import expand_counts, expand_hosts
from dure.placement.value import Reason

__all__ = ["Reader"]

T = TypeVar("T")

_LONGEST = 1_000_000  # characters of a list of names
_LARGEST = 0xFFFF_FFFF  # so far do the numbers of Slurm's steps go


class Reader:
    """The variables of one environment; what is malformed counts as absent, and makes a note.

    `reasons` and `notes` grow in the order of reading.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.reasons: list[Reason] = []
        self.notes: list[str] = []

    def has(self, *names: str) -> bool:
        """Tell whether all of `names` are set to something."""
        return all(self.text(name) for name in names)

    def text(self, *names: str) -> str | None:
        """Return the first of `names` that is set."""
        for name in names:
            value = self._environ.get(name, "").strip()
            if value:
                return value
        return None

    def number(self, *names: str) -> int | None:
        """Return the first of `names` that is a whole number, 0 or more."""
        return self._parsed(_whole, "a whole number", names)

    def launchers_number(self, *names: str) -> int | None:
        """Return the first of `names` that is a number in torchrun's words.

        Those may also be a range, whose end counts, or auto, cpu, gpu, which say nothing here.
        """
        text = self.text(*names) or ""
        if text.isalpha():
            return None
        least, colon, most = text.partition(":")
        if colon and least.isdecimal() and most.isdecimal():
            return int(most) if int(most) <= _LARGEST else None
        return self.number(*names)

    def hosts(self, *names: str) -> tuple[str, ...]:
        """Return the first of `names` that is a list of hosts, as Slurm writes it."""
        return self._parsed(expand_hosts, "a list of hosts", names) or ()

    def counts(self, *names: str) -> tuple[int, ...]:
        """Return the first of `names` that is a list of counts, as Slurm writes it."""
        return self._parsed(expand_counts, "a list of counts", names) or ()

    def names(self, *names: str) -> tuple[str, ...]:
        """Return the first of `names` that is a list of hosts in JSON."""
        return self._parsed(_json_names, "a list of names in JSON", names) or ()

    def take(self, what: str, why: str, *names: str) -> int | None:
        """Return the number in the first of `names` that holds one, and keep where it was."""
        for name in names:
            value = self.number(name)
            if value is not None:
                self.keep(what, value, name, why)
                return value
        return None

    def keep(self, what: str, value: object, source: str, why: str = "") -> None:
        """Keep where a value came from."""
        self.reasons.append(Reason(what=what, value=str(value), source=source, why=why))

    def note(self, text: str) -> None:
        """Keep what the user should know; once."""
        if text not in self.notes:
            self.notes.append(text)

    def _parsed(self, parse: Callable[[str], T], form: str, names: tuple[str, ...]) -> T | None:
        for name in names:
            text = self.text(name)
            if text is None:
                continue
            try:
                return parse(text)
            except ValueError:
                self.note(f"{name} is not {form}, and is passed over: {text[:80]!r}")
        return None


def _json_names(text: str) -> tuple[str, ...]:
    try:
        found: object = json.loads(text) if len(text) <= _LONGEST else None
    except RecursionError:
        found = None
    if not isinstance(found, list):
        raise ValueError(text)
    items = cast("list[object]", found)
    if not all(isinstance(name, str) and name for name in items):
        raise ValueError(text)
    return tuple(dict.fromkeys(str(name) for name in items))


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > _LARGEST:
        raise ValueError(text)
    return int(text)
