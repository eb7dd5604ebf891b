"""Which receive may take the next message."""

import pytest

from dure.comm.backends.mpi.matching import Unmatched


@pytest.mark.parametrize(
    ("posted", "may_probe"),
    [
        ([(1, 0), (1, 0)], [True, False]),
        ([(1, 0), (2, 0), (1, 5)], [True, True, True]),
        ([(None, 0), (1, 0), (1, 5)], [True, False, True]),
        ([(1, 0), (None, 0), (2, 0)], [True, False, False]),
        ([(None, 0), (None, 0), (None, 5)], [True, False, True]),
    ],
)
def test_receive_waits_for_earlier_ones_that_could_take_its_message(
    posted: list[tuple[int | None, int]], may_probe: list[bool]
) -> None:
    waiting = Unmatched()
    numbers = [waiting.add(*receive) for receive in posted]
    seen = [waiting.is_next(n, *receive) for n, receive in zip(numbers, posted, strict=True)]
    assert seen == may_probe


def test_removed_receive_lets_the_next_one_probe_and_nothing_is_kept() -> None:
    waiting = Unmatched()
    first, second, third = (waiting.add(src, 0) for src in (1, None, 1))
    waiting.remove(second, None, 0)
    assert not waiting.is_next(third, 1, 0)
    waiting.remove(first, 1, 0)
    assert waiting.is_next(third, 1, 0)
    waiting.remove(third, 1, 0)
    assert not vars(waiting)["_by_source"] and not vars(waiting)["_by_tag"]
