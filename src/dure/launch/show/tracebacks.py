"""Tracebacks of many ranks: each in one piece, and what all ranks say alike in full only once.

Lines of ranks fold one by one (`folding`), which would put the different tracebacks of two ranks
under one header. So the lines of a traceback, from its header to the line that names the error, go
through the folder as one.

An error of Dure's own mostly comes to several ranks in the same words, for each tells of all ranks
(`Desync`: who called what, where), while they are at different lines. The second rank's traceback
is then one line, which says where that rank was.
"""

from __future__ import annotations

import re

__all__ = ["Tracebacks", "say_alike", "words"]

_HEADER = b"Traceback (most recent call last):"
_RECORD = b"Flight record: "
_LONGEST = 1000  # lines that are kept together
_FRAME = re.compile(rb'(?m)^  File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
_OWN = re.compile(rb"dure\.errors\.(?P<kind>\w+): ")
_VARIES = re.compile(r" \(rank \d+ of \d+[^()]*\)|[\d.e-]+ (?=s\b|ms\b)|\brank\d+\.json")
"""What tells the ranks' own words apart: who speaks, times, the name of its flight record."""


def words(text: str) -> str:
    """Return a text without what differs between ranks that say the same."""
    return _VARIES.sub("", text)


def say_alike(one: str, other: str) -> bool:
    """Tell whether two ranks' errors are the same in other words."""
    return words(one) == words(other)


class Tracebacks:
    """The tracebacks in the lines of all ranks; a pipe is named by an object that stands for it."""

    def __init__(self) -> None:
        self._held: dict[object, list[bytes]] = {}
        self._told: dict[str, tuple[int, bytes]] = {}  # an error's words: who was first, and how

    def holds(self, owner: object) -> bool:
        return owner in self._held

    def release(self, owner: object) -> list[bytes]:
        """Return the lines that wait, as they are."""
        return self._held.pop(owner, [])

    def gather(self, owner: object, rank: int, lines: list[bytes]) -> list[bytes]:
        """Return lines, in which a traceback is one with line breaks in it."""
        if owner not in self._held and _HEADER not in lines:
            return lines
        out: list[bytes] = []
        alike = False  # the last traceback was told already, and so is the folder of its record
        for line in lines:
            held = self._held.get(owner)
            if held is None:
                if line == _HEADER:
                    self._held[owner] = [line]
                elif not (alike and line.startswith(_RECORD)):
                    out.append(line)
                continue
            held.append(line)
            if len(held) > _LONGEST:
                out += self.release(owner)
            elif not line.startswith(b" "):
                block = b"\n".join(self.release(owner))
                out.append(self._shortened(rank, block))
                alike = out[-1] is not block
        return out

    def _shortened(self, rank: int, block: bytes) -> bytes:
        """Return a traceback, or one line in its place if another rank has said the same."""
        last = block.rpartition(b"\n")[2]
        own, frames = _OWN.match(last), list(_FRAME.finditer(block))
        if own is None or not frames:
            return block
        first, told = self._told.setdefault(words(last.decode(errors="replace")), (rank, block))
        if first == rank or told == block:
            return block
        at = b"%s:%s" % (frames[-1]["file"], frames[-1]["line"])
        return b"the same %s as on rank %d, here at %s" % (own["kind"], first, at)
