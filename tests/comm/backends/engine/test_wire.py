"""The wire dtypes of foreign engines: what a simple engine reduces comes back right."""

import torch

from dure.comm.backends.engine.wire import as_wire
from dure.comm.ops import ReduceOp

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
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        assert as_wire(torch.zeros(3), op, 2, native_floats=True) is None
