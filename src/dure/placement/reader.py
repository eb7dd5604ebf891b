"""Reading variables, and keeping what was read: from where, and what could not be understood."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from dure.placement.nodes import expand_counts, expand_hosts
from dure.placement.value import Reason

__all__ = ["Reader"]

T = TypeVar("T")

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

    def counts(self, *names: str) -> tuple[int, ...]:
        """Return the first of `names` that is a list of counts, as Slurm writes it."""
        return self._parsed(expand_counts, "a list of counts", names) or ()

    def names(self, *names: str) -> tuple[str, ...]:
        """Return the first of `names` that is a list of hosts in JSON."""
        return self._parsed(_json_names, "a list of names in JSON", names) or ()

    def take(self, what: str, why: str, *names: str) -> int | None:
        """Return the number in the first of `names` that holds one, and keep where it was."""
        return self._taken(what, why, names, self.number)

    def take_count(self, what: str, why: str, *names: str) -> int | None:
        """Return the first of `names` that is a count in torchrun's words, and keep where it was.

        Those may also be a range, whose end counts, or auto, cpu, gpu, which say nothing here; nor
        does 0.
        """
        return self._taken(what, why, names, self.count)

    def count(self, name: str) -> int | None:
        """Return a count in torchrun's words."""
        return self._parsed(_count, "a number or a range", (name,)) or None

    def take_hosts(self, *names: str) -> tuple[str, ...]:
        """Return the first of `names` that is a list of hosts, as Slurm writes it, and keep it."""
        for name in names:
            hosts = self._parsed(expand_hosts, "a list of hosts", (name,))
            if hosts:
                self.keep("hosts", self.text(name), name, f"{len(hosts)} of them")
                return hosts
        return ()

    def _taken(
        self, what: str, why: str, names: Sequence[str], read: Callable[[str], int | None]
    ) -> int | None:
        for name in names:
            value = read(name)
            if value is not None:
                self.keep(what, value, name, why)
                return value
        return None

    def keep(self, what: str, value: object, source: str, why: str = "") -> None:
        self.reasons.append(Reason(what=what, value=str(value), source=source, why=why))

    def note(self, text: str) -> None:
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
        names = msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise ValueError(text) from error
    return tuple(dict.fromkeys(filter(None, names)))


def _count(text: str) -> int:
    if text.isalpha():
        return 0
    least, colon, most = text.partition(":")
    return max(_whole(least), _whole(most)) if colon else _whole(least)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > _LARGEST:
        raise ValueError(text)
    return int(text)
