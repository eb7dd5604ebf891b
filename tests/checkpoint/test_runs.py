"""Columns of numbers as runs, forth and back, and columns that lie."""

from __future__ import annotations

import numpy as np
import pytest

from dure.checkpoint.runs import MOST_ROWS, column_of, runs_of

RUNS = {
    "no rows": ([], []),
    "few": ([0, 64, 128], [0, 64, 128]),
    "steps": ([0, 64, 128, 192], [[0, 64, 4]]),
    "equal": ([7] * 5, [[7, 0, 5]]),
    "falling": ([8, 6, 4, 2, 0], [[8, -2, 5]]),
    "the last is shorter": ([64] * 9 + [17], [[64, 0, 9], 17]),
    "two runs": ([0, 1, 2, 3, 4, 9, 9, 9, 9, 9], [[0, 1, 5], [9, 0, 5]]),
    "irregular": ([5, 1, 9, 3, 4, 0], [5, 1, 9, 3, 4, 0]),
    "irregular at both ends": ([9, 3, *range(20), 7], [9, 3, [0, 1, 20], 7]),
}


@pytest.mark.parametrize("kind", RUNS)
def test_columns_are_runs_where_they_are_regular(kind):
    numbers, runs = RUNS[kind]
    assert runs_of(np.array(numbers, np.int64)) == runs
    column = column_of(runs)
    assert column.numbers() == numbers
    assert [column[row] for row in range(len(column))] == numbers
    assert column.largest() == max(numbers, default=-1)


def test_rows_of_a_number_are_found_without_writing_columns_out():
    column = column_of([[0, 64, 10000], 64, [64, 0, 3], [192, -64, 4]])
    assert column.find(64) == [1, 10000, 10001, 10002, 10003, 10006]
    assert column.find(63) == []
    assert column.find(639936) == [9999]
    assert column_of([3, 4, 3]).find(3) == [0, 2]


LIES = {
    "no list": "0",
    "below 0": [0, -1],
    "a run that falls below 0": [[4, -1, 6]],
    "no number": [0, 1.0],
    "True": [True],
    "too large": [1 << 62],
    "a run that is too large": [[0, 1 << 61, 9]],
    "two numbers": [[0, 1]],
    "no rows in a run": [[0, 1, 0]],
    "more rows than there can be": [[0, 0, MOST_ROWS], 1],
}


@pytest.mark.parametrize("lie", LIES)
def test_column_that_lies_is_refused(lie):
    with pytest.raises(ValueError, match=r"column|run|numbers"):
        column_of(LIES[lie])
