"""The values that are sent and the check of what comes back: right is right, and wrong is seen."""

import numpy as np
import pytest

from dure.cli.bench.plan import OPERATIONS
from dure.cli.bench.rank import Case, Segment, expected, inputs, period

SIZE = 3


def case(op: str, rank: int = 0, redop: str = "", **other) -> Case:
    values = {"dtype": "float32", "count": 9000, "root": -1, "arena": False, **other}
    return Case(op=op, redop=redop, rank=rank, size=SIZE, **values)


def values_of(asked: Case, segments: list[Segment]) -> np.ndarray:
    """Spell out what segments hold."""
    parts = [np.resize(np.array(period(asked, s)), s.length) for s in segments]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def sources(op: str, redop: str = "") -> list[np.ndarray]:
    return [values_of(case(op, r, redop), [inputs(case(op, r, redop))]) for r in range(SIZE)]


def results(op: str, redop: str = "") -> list[np.ndarray]:
    return [values_of(case(op, r, redop), expected(case(op, r, redop))) for r in range(SIZE)]


@pytest.mark.parametrize(
    ("redop", "fold"),
    [
        ("sum", np.add.reduce),
        ("product", np.multiply.reduce),
        ("min", np.minimum.reduce),
        ("max", np.maximum.reduce),
        ("avg", lambda x: np.add.reduce(x) / SIZE),
    ],
)
def test_reductions_expect_what_numpy_computes(redop, fold):
    total = fold(np.stack(sources("all_reduce", redop)))
    assert all((out == total).all() for out in results("all_reduce", redop))
    parts = np.split(total, SIZE)
    for out, part in zip(results("reduce_scatter", redop), parts, strict=True):
        assert (out == part).all()
    assert [len(out) for out in results("reduce", redop)] == [0, 0, 9000]


def test_moves_expect_the_other_ranks_values():
    whole = np.concatenate(sources("all_gather"))
    assert all((out == whole).all() for out in results("all_gather"))
    assert (results("gather")[SIZE - 1] == whole).all()
    assert all((out == sources("broadcast")[-1]).all() for out in results("broadcast"))
    sent = [np.split(x, SIZE) for x in sources("all_to_all")]
    for rank, out in enumerate(results("all_to_all")):
        assert (out == np.concatenate([parts[rank] for parts in sent])).all()
    for out, part in zip(results("scatter"), np.split(sources("scatter")[-1], SIZE), strict=True):
        assert (out == part).all()
    zero, one, two = results("sendrecv")
    assert (zero == sources("sendrecv")[1]).all()
    assert (one == sources("sendrecv")[0]).all()
    assert two.size == 0


def test_every_operation_but_the_barrier_checks_something():
    for name, operation in OPERATIONS.items():
        redop = "sum" if operation.reduces else ""
        checked = sum(out.size for out in results(name, redop))
        assert (checked > 0) == (name != "barrier")


def test_a_result_of_one_rank_less_or_shifted_by_a_chunk_is_wrong():
    right = results("all_reduce", "sum")[0]
    one_less = sum(sources("all_reduce", "sum")[:2])
    assert np.all(one_less != right)
    for chunk in (16, 4096):
        assert np.any(np.roll(right, chunk) != right)


def test_root_in_turn_or_fixed():
    assert [case("broadcast").root_of(i) for i in range(4)] == [0, 1, 2, 0]
    fixed = case("broadcast", root=1)
    assert [fixed.root_of(i) for i in range(4)] == [1, 1, 1, 1]
    assert fixed.checked_root == 1
