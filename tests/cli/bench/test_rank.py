"""What ranks must hold: spelled out for three of them, and different where a result is wrong."""

import pytest
import torch

from dure.cli.bench.rank import Case, expected


def case(op: str, rank: int, count: int = 6) -> Case:
    return Case(op, torch.float32, count, rank=rank, size=3)


# Values of ranks 0 to 2 are 1, 2, 3, ...; 18, 19, ...; 35, 36, ... where they are moved, and 1 to 5
# in turn from 1, 2, 3 where they are added up.
@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("all_reduce", [[6, 9, 12, 10, 8, 6]] * 3),
        ("reduce", [None, None, [6, 9, 12, 10, 8, 6]]),
        ("reduce_scatter", [[6, 9], [12, 10], [8, 6]]),
        ("broadcast", [[35, 36, 37, 38, 39, 40]] * 3),
        ("all_gather", [[1, 2, 18, 19, 35, 36]] * 3),
        ("gather", [None, None, [1, 2, 18, 19, 35, 36]]),
        ("scatter", [[35, 36], [37, 38], [39, 40]]),
        (
            "all_to_all",
            [[1, 2, 18, 19, 35, 36], [3, 4, 20, 21, 37, 38], [5, 6, 22, 23, 39, 40]],
        ),
        ("sendrecv", [[18, 19, 20, 21, 22, 23], [1, 2, 3, 4, 5, 6], None]),
        ("barrier", [None, None, None]),
    ],
)
def test_ranks_must_hold(op, wanted):
    found = [expected(case(op, rank)) for rank in range(3)]
    assert [None if each is None else each.tolist() for each in found] == wanted
