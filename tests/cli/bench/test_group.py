"""What the controller makes of the ranks' answers."""

from __future__ import annotations

from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from dure.cli.bench.group import Contestant, Group, GroupFailed


class PretendedGroup(Group):
    """Ranks that are the other ends of pipes."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(Contestant(role=("dure", "shm")), num_ranks)
        pipes = [Pipe() for _ in range(num_ranks)]
        self._connections: list[Connection] = [ours for ours, _ in pipes]
        self.far = [theirs for _, theirs in pipes]

    def _end(self, *, politely: bool) -> None:
        for end in (*self._connections, *self.far):
            end.close()

    def _last_words(self) -> list[str]:
        return []


def test_a_rank_that_raises_while_another_hangs_is_told_at_once() -> None:
    group = PretendedGroup(2)
    group.far[1].send({"error": "wrong shape"})
    with pytest.raises(GroupFailed) as caught:
        group.call("sample")  # rank 0 never answers; the limit is two minutes
    assert caught.value.seen == "rank 1: wrong shape"


def test_answers_come_in_the_order_of_ranks_whoever_is_first() -> None:
    group = PretendedGroup(3)
    for rank in (2, 0, 1):
        group.far[rank].send({"seconds": rank})
    assert group.call("sample") == [{"seconds": 0}, {"seconds": 1}, {"seconds": 2}]
    group._end(politely=True)
