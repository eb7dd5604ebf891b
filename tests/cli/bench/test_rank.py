"""What ranks must hold: spelled out for three of them, and different where a result is wrong."""

import numpy as np
import pytest

from dure.cli.bench.rank import Case, Segment, expected, inputs, period


def case(op: str, rank: int, redop: str = "", count: int = 6) -> Case:
    about = {"dtype": "float32", "count": count, "root": -1, "arena": False}
    return Case(op=op, redop=redop, rank=rank, size=3, **about)


def spelled(asked: Case, segments: list[Segment]) -> list[int]:
    return [v for s in segments for v in np.resize(period(asked, s), s.length).tolist()]


# Values of ranks 0 to 2 are 1, 2, 3, ...; 18, 19, ...; 35, 36, ... where they are moved, and 1 to 5
# in turn from 1, 2, 3 where they are added up.
@pytest.mark.parametrize(
    ("op", "redop", "held"),
    [
        ("all_reduce", "sum", [[6, 9, 12, 10, 8, 6]] * 3),
        ("all_reduce", "avg", [[6, 9, 12, 10, 8, 6]] * 3),
        ("all_reduce", "min", [[1, 2, 3, 1, 1, 1]] * 3),
        ("all_reduce", "max", [[3, 4, 5, 5, 5, 3]] * 3),
        ("all_reduce", "product", [[2, 2, 2, 2, 2, 2]] * 3),
        ("reduce", "sum", [[], [], [6, 9, 12, 10, 8, 6]]),
        ("reduce_scatter", "sum", [[6, 9], [12, 10], [8, 6]]),
        ("broadcast", "", [[35, 36, 37, 38, 39, 40]] * 3),
        ("all_gather", "", [[1, 2, 18, 19, 35, 36]] * 3),
        ("gather", "", [[], [], [1, 2, 18, 19, 35, 36]]),
        ("scatter", "", [[35, 36], [37, 38], [39, 40]]),
        (
            "all_to_all",
            "",
            [[1, 2, 18, 19, 35, 36], [3, 4, 20, 21, 37, 38], [5, 6, 22, 23, 39, 40]],
        ),
        ("sendrecv", "", [[18, 19, 20, 21, 22, 23], [1, 2, 3, 4, 5, 6], []]),
        ("barrier", "", [[], [], []]),
    ],
)
def test_ranks_must_hold(op, redop, held):
    cases = [case(op, rank, redop) for rank in range(3)]
    assert [spelled(asked, expected(asked)) for asked in cases] == held


def test_a_result_of_one_rank_less_or_shifted_by_a_chunk_is_wrong():
    cases = [case("all_reduce", rank, "sum", 9000) for rank in range(3)]
    right = np.array(spelled(cases[0], expected(cases[0])))
    two = sum(np.array(spelled(asked, [inputs(asked)])) for asked in cases[:2])
    assert np.all(two != right)
    for chunk in (16, 4096):
        assert np.any(np.roll(right, chunk) != right)
