"""Which groups are split off by one split."""

from __future__ import annotations

import pytest

from dure.comm.splitting import rounds_of

CASES = {
    "one group": ([[0, 1]], [[0]]),
    "an axis": ([[0, 1], [2, 3]], [[0, 1]]),
    "two axes": ([[0, 1], [2, 3], [0, 2], [1, 3]], [[0, 1], [2, 3]]),
    "the same ranks twice": ([[0, 1], [0, 1]], [[0], [1]]),
    "a later group that fits into the first round": ([[0, 1], [1, 2], [2, 3]], [[0, 2], [1]]),
}


@pytest.mark.parametrize("case", CASES)
def test_groups_of_a_round_share_no_rank(case: str):
    rank_lists, rounds = CASES[case]
    assert rounds_of(rank_lists) == rounds
