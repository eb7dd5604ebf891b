r"""What a rank draws on a terminal: rows that may still change, and lines that are complete.

A progress bar goes back to the start of its line (`\r`), and several bars move the cursor up and
down. As each rank has its own part of the terminal, these movements are carried out here, on *rows*
of the rank's own. The terminal shows the rows of all ranks in an area at its bottom, and a row that
will not change any more leaves as a line.

- A row above the cursor is complete if the cursor does not return to it within `SETTLE_S` (tqdm
  moves down to its second bar and back up in a moment).
- Text that is written after the cursor has returned to the start of a row that had text, or has
  moved up, begins a redraw, and completes all rows above (rich moves up to the first row that it
  draws again).
- A program that hides the cursor (rich, while a `Live` or `Progress` runs) draws all its rows again
  later, so only the second rule applies until it shows the cursor.
- `\r` followed by text replaces the row: programs that redraw a line also clear its old end.

Output without these movements is cut into lines as by `LineReader`, and costs the same.
"""

from __future__ import annotations

import re

from dure.launch.show.output import LineReader
from dure.launch.spec import Stream

__all__ = ["SETTLE_S", "Screen"]

SETTLE_S = 0.1
_MOST_ROWS = 100
_LONGEST = 1 << 20  # bytes of a row
_DRAWS = re.compile(rb"\r(?!\n)|\x1b\[[0-9;]*[ABEFGJK]|\x1b\[\?25[lh]")
_TOKEN = re.compile(rb"[\r\n]|\x1b\[[0-9;?]*[@-~]|[^\r\n\x1b]+|\x1b")
_CUT = re.compile(rb"\x1b(\[[0-9;?]*)?\Z")
_MOVE = re.compile(rb"\x1b\[(\??[0-9]*)[0-9;]*([@-~])")


class Screen(LineReader):
    """Cuts the bytes of one pipe into lines, and keeps the rows that may still change."""

    def __init__(self, rank: int, stream: Stream) -> None:
        super().__init__(rank, stream)
        self._complete: list[bytes] = []
        self._row = 0  # in which row the cursor is
        self._returned = False  # the cursor is at the start of its row
        self._redraws = False  # the next text begins a redraw
        self._hidden = False
        self._cut = b""  # the start of an escape sequence whose end has not come

    @property
    def show_at(self) -> float:
        """When what is held back is shown; of a drawing, when rows are complete."""
        return self._last_at + SETTLE_S if self.rows else super().show_at

    @property
    def holds(self) -> bool:
        """Whether something will be shown at `show_at`."""
        if not self.rows:
            return super().holds
        return not self._hidden and (self._row > 0 or not b"".join(self.rows).strip())

    @property
    def held(self) -> bytes:
        """The last row that has text, or an unfinished line."""
        return next(filter(None, reversed(self.rows)), b"") if self.rows else super().held

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Take bytes, and return the lines that they complete, without their newlines."""
        if not self.rows and not _DRAWS.search(data):
            return super().feed(data, now)
        self._last_at = now
        if not self.rows:
            self.rows = [super().flush()]
        data = self._cut + data
        cut = _CUT.search(data)
        self._cut = cut[0] if cut else b""
        for token in _TOKEN.findall(data[: cut.start()] if cut else data):
            self._carry_out(token)
        self._complete_above(self._row - _MOST_ROWS)
        return self._taken()

    def overdue(self) -> tuple[list[bytes], bytes]:
        """Return the rows above the cursor, to which it has not returned; or part of a line."""
        if not self.rows:
            return super().overdue()
        self._complete_above(self._row)
        while len(self.rows) > 1 and not self.rows[-1].strip():
            self.rows.pop()
        if not b"".join(self.rows).strip():
            self.rows = []
        return self._taken(), b""

    def flush(self) -> bytes:
        """Return all that is held back, and hold it back no longer."""
        if not self.rows:
            return super().flush()
        text = b"\n".join(self.rows).rstrip()
        self.rows, self._row, self._hidden, self._cut = [], 0, False, b""
        self._returned = self._redraws = False
        return text

    def _taken(self) -> list[bytes]:
        lines, self._complete = self._complete, []
        return lines

    def _carry_out(self, token: bytes) -> None:
        if token == b"\n":
            self._move(1)
            self._returned = True
        elif token == b"\r":
            self._redraws = self._redraws or not self._returned
            self._returned = True
        elif token.startswith(b"\x1b["):
            self._control(token)
        else:
            self._write(token)

    def _control(self, token: bytes) -> None:
        found = _MOVE.fullmatch(token)
        number, letter = (found[1], found[2]) if found else (b"", b"")
        count = min(int(number), _MOST_ROWS) if number.isdigit() else 1
        if letter in b"AF":
            self._move(-count)
            self._returned = self._returned or letter == b"F"
        elif letter in b"BE":
            self._move(count)
            self._returned = self._returned or letter == b"E"
        elif letter == b"G":
            self._returned = True
        elif letter == b"K" and (self._returned or number == b"2"):
            self.rows[self._row] = b""
        elif letter == b"J":
            self.rows[self._row + 1 :] = []
            if self._returned:
                self.rows[self._row] = b""
        elif letter in b"hl" and number == b"?25":
            self._hidden = letter == b"l"
        elif letter == b"m" and self._returned and number in (b"", b"0"):
            self.rows[self._row] += token  # it ends the text before it, and starts no new one
        elif letter == b"m":
            self._write(token)

    def _move(self, count: int) -> None:
        self._row = max(0, self._row + count)
        self._redraws = count < 0
        while len(self.rows) <= self._row:
            self.rows.append(b"")

    def _write(self, text: bytes) -> None:
        if self._redraws:
            self._complete_above(self._row)
            self._redraws = False
        if self._returned:
            self.rows[self._row] = b""
            self._returned = False
        self.rows[self._row] = (self.rows[self._row] + text.replace(b"\b", b""))[:_LONGEST]

    def _complete_above(self, row: int) -> None:
        if row > 0:
            self._complete += self.rows[:row]
            self.rows[:row] = []
            self._row -= row
