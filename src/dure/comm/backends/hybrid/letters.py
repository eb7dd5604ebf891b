"""Matching announced messages with posted receives (see messages.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Box", "Letter", "Wanted"]


@dataclass(frozen=True, slots=True)
class Letter:
    """An announced message."""

    source: int
    number: int
    tag: int
    nbytes: int
    dtype: int


@dataclass(slots=True, eq=False)
class Wanted:
    """A posted receive; `letter` is what answers it, `answered` is called then."""

    source: int | None
    tag: int
    answered: Callable[[], object]
    letter: Letter | None = None
    found: threading.Event = field(default_factory=threading.Event)

    def fits(self, letter: Letter) -> bool:
        """Tell whether `letter` may answer."""
        return self.tag == letter.tag and self.source in (None, letter.source)


class Box:
    """Envelopes that nobody has asked for, and receives that nobody has answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._letters: list[Letter] = []
        self._wanted: list[Wanted] = []

    def deliver(self, letter: Letter) -> None:
        """Give a letter to the first receive that it fits."""
        with self._lock:
            wanted = next((w for w in self._wanted if w.fits(letter)), None)
            if wanted is None:
                self._letters.append(letter)
                return
            self._wanted.remove(wanted)
            wanted.letter = letter
        wanted.answered()
        wanted.found.set()

    def post(self, wanted: Wanted) -> None:
        """Ask for a letter."""
        with self._lock:
            letter = next((x for x in self._letters if wanted.fits(x)), None)
            if letter is None:
                self._wanted.append(wanted)
                return
            self._letters.remove(letter)
            wanted.letter = letter
        wanted.answered()
        wanted.found.set()

    def withdraw(self, wanted: Wanted) -> bool:
        """Take a receive back; False if it has been answered."""
        with self._lock:
            if wanted.letter is not None:
                return False
            if wanted in self._wanted:
                self._wanted.remove(wanted)
            return True

    def put_back(self, letter: Letter) -> None:
        """Return a letter that its receive could not use, before all others."""
        with self._lock:
            self._letters.insert(0, letter)
