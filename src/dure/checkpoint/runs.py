"""Columns of numbers in the manifest, as runs of a constant step.

Most tensors are divided regularly: slice k begins at row 64 k, and is in the file of rank k. A
*run* is [first, step, count]: the numbers first, first + step, and so on. A *column* is a list of
runs and single numbers, so a tensor of 10,000 equal slices takes as much text as one of 4:

    [[0, 64, 10000]]          0, 64, 128, ... 639936
    [[64, 0, 9999], 17]       64, 64, ... 64, 17

A column is asked for single rows, or for the rows of a number, without being written out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np

__all__ = ["MOST_ROWS", "Column", "Runs", "column_of", "runs_of"]

Array = np.ndarray[Any, Any]
Runs = list[Any]
"""A column as it is in the manifest: of each item a number, or [first, step, count]."""

MOST_ROWS = 1 << 20
"""More rows than that are refused: three numbers can claim any count.

A million slices of a tensor are a hundred of each of 10,000 ranks.
"""
_LARGEST = 1 << 62
_SHORTEST = 4
"""Numbers that a run has at least."""


class Column:
    """A column of a tensor's slices.

    Args:
        runs: First number, step and count of each run.
    """

    def __init__(self, runs: Sequence[tuple[int, int, int]]) -> None:
        self._runs = runs
        self._ends = list(accumulate([count for _, _, count in runs]))

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> int:
        """Return the number of a row. Cost: O(log runs)."""
        at = bisect_right(self._ends, row)
        first, step, count = self._runs[at]
        return first + step * (row - self._ends[at] + count)

    def array(self) -> Array:
        """Return all numbers. Cost: O(rows)."""
        runs = [
            first + step * np.arange(count, dtype=np.int64) for first, step, count in self._runs
        ]
        return np.concatenate([np.empty(0, np.int64), *runs])

    def numbers(self) -> list[int]:
        """Return all numbers. Cost: O(rows)."""
        return self.array().tolist()

    def find(self, number: int) -> list[int]:
        """Return the rows that have this number, ascending. Cost: O(runs), and the rows found."""
        found: list[int] = []
        for (first, step, count), end in zip(self._runs, self._ends, strict=True):
            if step == 0:
                found += range(end - count, end) if first == number else ()
                continue
            within, rest = divmod(number - first, step)
            if rest == 0 and 0 <= within < count:
                found.append(end - count + within)
        return found

    def largest(self) -> int:
        """Return the largest number; -1 if there are no rows."""
        return max((max(a, a + s * (n - 1)) for a, s, n in self._runs), default=-1)


class _Plain(list[int]):
    """A column without runs, as most of a few slices."""

    def array(self) -> Array:
        return np.array(self, np.int64)

    def numbers(self) -> list[int]:
        return self

    def find(self, number: int) -> list[int]:
        return [row for row, own in enumerate(self) if own == number]

    def largest(self) -> int:
        return max(self, default=-1)


def column_of(runs: Any) -> Column | _Plain:
    """Return the column that a manifest has.

    Raises:
        ValueError: It is not a column: of another form, of numbers below 0, or too long.
    """
    if not isinstance(runs, list):
        raise ValueError(f"{runs!r:.60} is not a column of numbers")
    if set(map(type, cast(list[Any], runs))) == {int}:
        plain = _Plain(cast(list[int], runs))
        if min(plain) < 0 or max(plain) >= _LARGEST or len(plain) > MOST_ROWS:
            raise ValueError(f"{runs!r:.60} has numbers below 0, or too large")
        return plain
    total = 0
    found: list[tuple[int, int, int]] = []
    for item in cast(list[Any], runs):
        run = cast(list[Any], item) if isinstance(item, list) else [item, 0, 1]
        if [type(number) for number in run] != [int, int, int]:
            raise ValueError(f"{item!r:.60} is not a run of numbers")
        first, step, count = run
        total += count
        if count < 1 or total > MOST_ROWS:
            raise ValueError(f"a column has {count} numbers in a run, and {total} so far")
        if not (0 <= first < _LARGEST and 0 <= first + step * (count - 1) < _LARGEST):
            raise ValueError(f"{item!r:.60} has numbers below 0, or too large")
        found.append((first, step, count))
    return Column(found)


def runs_of(numbers: Array) -> Runs:
    """Return a column as the manifest has it."""
    total = len(numbers)
    if total < _SHORTEST:
        return numbers.tolist()
    steps = np.diff(numbers)
    # Group g of equal steps joins the numbers begins[g] to begins[g + 1].
    begins = np.flatnonzero(np.concatenate([[True], steps[1:] != steps[:-1]])).tolist()
    if len(begins) * _SHORTEST > total + _SHORTEST:
        return numbers.tolist()
    runs: Runs = []
    at = 0
    for begin, end in zip(begins, [*begins[1:], total - 1], strict=True):
        count = end - at + 1
        if count >= _SHORTEST:
            runs.append([int(numbers[at]), int(steps[begin]), count])
            at = end + 1
        else:
            runs += numbers[at:end].tolist()
            at = end
    return runs + numbers[at:].tolist()
