"""The rule that keeps two parts of a job from going on: over all ways a group can fall apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.store.quorum import may_go_on


@pytest.mark.parametrize(
    ("voters", "goes_on"),
    [
        ([(1, True), (1, True), (1, False)], True),
        ([(1, True), (1, False), (1, False)], False),
        ([(1, True), (1, False)], True),
        ([(1, False), (1, True)], False),
        ([(8, False), (9, True)], True),
        ([(1, False)], False),
        ([], True),
    ],
)
def test_more_than_half_or_half_with_the_first(voters: list[tuple[int, bool]], goes_on: bool):
    assert may_go_on(voters) == goes_on


@given(
    votes=st.lists(st.integers(1, 3), min_size=1, max_size=8),
    fates=st.lists(st.sampled_from(["first", "second", "dead"]), min_size=8, max_size=8),
    known=st.lists(st.sampled_from(["", "first", "second", "both"]), min_size=8, max_size=8),
)
def test_two_parts_never_go_on_at_once_whatever_each_knows_of_the_dead(
    votes: list[int], fates: list[str], known: list[str]
):
    def goes_on(part: str) -> bool:
        voters = [
            (n, fates[i] == part)
            for i, n in enumerate(votes)
            if fates[i] != "dead" or known[i] not in (part, "both")
        ]
        return any(here for _, here in voters) and may_go_on(voters)

    assert not (goes_on("first") and goes_on("second"))
