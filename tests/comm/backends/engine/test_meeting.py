"""Hosts that wait for each other at their first operation, by the notes that they have written."""

from __future__ import annotations

from typing import Any

import pytest

from dure.comm.backends.engine.meeting import Note, blocked_hosts, encode


class Notes:
    """A store that has notes, and nothing else."""

    def __init__(self, notes: dict[int, Note]) -> None:
        self._values = {f"meeting/note/{rank}": encode(note) for rank, note in notes.items()}

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return self._values[key]


def found(own: Note, others: dict[int, Note]) -> dict[int, str]:
    """Return the circle that rank 0 of three finds."""
    store: Any = Notes(others)
    return blocked_hosts(store, 0, own)


def note(key: str, missing: list[int], *made: str) -> Note:
    return Note(key, missing, [key, *made], f"send in {key}")


CASES = {
    "a circle": (
        {0: note("0:1", [1]), 1: note("1:2", [2]), 2: note("0:2", [0])},
        {
            0: "send in 0:1 (its first; waits for rank 1)",
            1: "send in 1:2 (its first; waits for rank 2)",
            2: "send in 0:2 (its first; waits for rank 0)",
        },
    ),
    "an old note: rank 1 has made it": (
        {0: note("0:1", [1]), 1: note("1:2", [2], "0:1"), 2: note("0:2", [0])},
        {},
    ),
    "an old note: rank 0 has made it": (
        {0: note("0:1", [1], "0:2"), 1: note("1:2", [2]), 2: note("0:2", [0])},
        {},
    ),
    "a rank that waits for none": (
        {0: note("0:1", [1]), 1: note("1:2", []), 2: note("0:2", [0])},
        {},
    ),
    "a rank that has not written": ({0: note("0:1", [1]), 2: note("0:2", [0])}, {}),
    "a circle of others": (
        {0: note("0:1", [1]), 1: note("1:2", [2]), 2: note("all", [1])},
        {
            1: "send in 1:2 (its first; waits for rank 2)",
            2: "send in all (its first; waits for rank 1)",
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_are_deadlocked_if_each_is_blocked_by_the_next(case: str):
    notes, expected = CASES[case]
    assert found(notes[0], {r: each for r, each in notes.items() if r}) == expected
