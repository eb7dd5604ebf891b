"""The wire dtypes of foreign engines: what a simple engine reduces comes back right."""

import pytest
import torch

from dure.comm.backends.engine.wire import as_wire
from dure.comm.ops import ReduceOp

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGER = {torch.float64: torch.int64}
WIRED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
WIRED |= {torch.complex64, torch.complex128}


def test_engine_without_bit_operations_has_no_wire_form_for_them():
    assert as_wire(torch.zeros(3, dtype=torch.int64), ReduceOp.BXOR, 2, bitwise=False) is None
    assert as_wire(torch.zeros(3, dtype=torch.int64), ReduceOp.SUM, 2, bitwise=False) is not None


def test_engines_that_lose_nan_get_no_minima_and_maxima_of_floats():
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        assert as_wire(torch.zeros(3), op, 2) is None


def test_floats_that_the_engine_reduces_itself_travel_as_they_are():
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            tensor = torch.ones(3, dtype=dtype)
            found = as_wire(tensor, op, 2, native_floats=True)
            assert (found.wire.data_ptr(), found.op) == (tensor.data_ptr(), op.name)
            assert found.copy_back is None
    parts = as_wire(torch.ones(3, dtype=torch.complex64), ReduceOp.AVG, 2, native_floats=True)
    assert (parts.op, len(parts.wire)) == ("AVG", 6)
    for dtype in (torch.float8_e5m2, torch.int32):  # widened, and divided after the sum
        assert as_wire(torch.ones(3).to(dtype), ReduceOp.AVG, 2, native_floats=True).op == "SUM"


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2])
def test_minima_and_maxima_of_floats_are_those_of_integers(dtype):
    """The engine compares integers, element by element: NaN wins, and -0 is less than 0."""
    left = torch.tensor([1.0, -1.0, -INF, INF, NAN, 2.0, NAN, NAN, -0.0, 0.5]).to(dtype)
    right = torch.tensor([2.0, -2.0, 1.0, -1.0, 1.0, NAN, -INF, INF, 0.0, -0.25]).to(dtype)
    least = [1.0, -2.0, -INF, -1.0, NAN, NAN, NAN, NAN, -0.0, -0.25]
    most = [2.0, -1.0, 1.0, INF, NAN, NAN, NAN, NAN, 0.0, 0.5]
    for op, fold, expected in (
        (ReduceOp.MIN, torch.minimum, least),
        (ReduceOp.MAX, torch.maximum, most),
    ):
        a, b = (as_wire(t.clone(), op, 2, bitwise=False, native_floats=True) for t in (left, right))
        assert (a.op, a.wire.dtype) == (op.name, INTEGER.get(dtype, torch.int32))
        result = torch.empty(10, dtype=dtype)
        assert a.copy_back is not None
        a.copy_back(fold(a.wire, b.wire), result)
        torch.testing.assert_close(result.double(), torch.tensor(expected).double(), equal_nan=True)
        assert result[8].double().signbit() == (op is ReduceOp.MIN)


@pytest.mark.parametrize(
    ("op", "fold", "expected"),
    [
        (ReduceOp.SUM, torch.maximum, [False, True, True]),
        (ReduceOp.MAX, torch.maximum, [False, True, True]),
        (ReduceOp.BOR, torch.maximum, [False, True, True]),
        (ReduceOp.PRODUCT, torch.minimum, [False, False, True]),
        (ReduceOp.MIN, torch.minimum, [False, False, True]),
        (ReduceOp.BAND, torch.minimum, [False, False, True]),
        (ReduceOp.BXOR, torch.add, [False, True, False]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_bools_are_reduced_as_bytes(op, fold, expected):
    left, right = torch.tensor([False, True, True]), torch.tensor([False, False, True])
    a, b = (as_wire(t, op, 2, bitwise=False, native_floats=True) for t in (left, right))
    assert (a.wire.dtype, a.op) == (
        torch.uint8,
        {"maximum": "MAX", "minimum": "MIN"}.get(fold.__name__, "SUM"),
    )
    back = a.copy_back or (lambda wire, out: out.copy_(wire))
    result = torch.empty(3, dtype=torch.bool)
    back(fold(a.wire, b.wire), result)
    assert result.tolist() == expected
    assert (left.tolist(), right.tolist()) == ([False, True, True], [False, False, True])


def test_an_odd_number_of_300_ranks_is_a_true_xor():
    wired = as_wire(torch.tensor([True, True]), ReduceOp.BXOR, 300, False, True)
    result = torch.empty(2, dtype=torch.bool)
    assert wired is not None and wired.copy_back is not None
    wired.copy_back(torch.tensor([299 % 256, 300 % 256], dtype=torch.uint8), result)
    assert result.tolist() == [True, False]
