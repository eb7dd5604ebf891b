"""Hosts that wait for each other at their first operation, by the notes that they have written."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dure import HashStore
from dure.comm.backends.engine.meeting import Meetings, Note, blocked_hosts, encode
from dure.errors import CommTimeout


class Notes:
    """A store that has notes, and nothing else."""

    def __init__(self, notes: dict[int, Note]) -> None:
        self._values = {f"meeting/note/{rank}": encode(note) for rank, note in notes.items()}

    def missing_keys(self, keys: list[str]) -> tuple[str, ...]:
        return tuple(key for key in keys if key not in self._values)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._values[key] for key in keys]


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
    "a circle beside a rank that waits for none": (
        {0: note("all", [1, 2]), 1: note("1:2", []), 2: note("0:2", [0])},
        {
            0: "send in all (its first; waits for rank 2)",
            2: "send in 0:2 (its first; waits for rank 0)",
        },
    ),
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


class CountingStore(HashStore):
    """Notes how many keys each request asks for that names several."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def missing_keys(self, keys: Any) -> tuple[str, ...]:
        self.asked.append(len(keys))
        return super().missing_keys(keys)

    def check(self, keys: Any) -> bool:
        self.asked.append(len(keys))
        return super().check(keys)


def test_a_rank_that_waits_for_many_has_few_requests():
    """One for the entries of 200 ranks and one for the notes of 199, after 0.2 s and not again."""
    store = CountingStore()
    state: Any = SimpleNamespace(
        rank=0, size=200, name="g", left=threading.Event(), record=None, where=lambda *_, **__: {}
    )
    with pytest.raises(CommTimeout):
        Meetings(store, state, None).meet(None, "all_reduce", timedelta(seconds=1))
    assert store.asked == [200, 199, 200]  # the last at the timeout, to name the ranks
