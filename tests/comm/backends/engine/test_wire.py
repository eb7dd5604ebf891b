"""The wire dtypes of foreign engines: what a simple engine reduces comes back right."""

from __future__ import annotations

import pytest
import torch

from dure.comm.backends.engine.wire import as_wire
from dure.comm.ops import ReduceOp, reducible_dtypes
from dure.comm.reduction import reduce_in_order
from tests.comm.conformance.values import contribution, reduced, same

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


INTEGERS = {torch.int8, torch.uint8, torch.int32, torch.int64}


WIRED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
WIRED |= {torch.complex64, torch.complex128}


PLAIN = {torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}


def _dtypes(name: str) -> list[torch.dtype]:
    return sorted(reducible_dtypes(getattr(ReduceOp, name)), key=str)


@pytest.mark.parametrize("name", OPS)
def test_wire_form_reduced_by_a_simple_engine_comes_back_right(name):
    """An engine that knows the plain dtypes only reduces the wire forms, part by part."""
    n, op = 3, getattr(ReduceOp, name)
    for dtype in _dtypes(name):
        tensors = [contribution(r, 24, dtype, name) for r in range(n)]
        wired = [as_wire(t, op, n) for t in tensors]
        folded = dtype in INTEGERS or (dtype in WIRED and name in ("SUM", "AVG", "PRODUCT"))
        if wired[0] is None:
            assert wired == [None] * n
            assert not folded or (dtype.is_complex and name == "PRODUCT"), dtype
            continue
        wires = [c.wire.clone() for c in wired if c is not None]
        assert wires[0].dtype in PLAIN
        result = torch.empty_like(wires[0])
        reduce_in_order(wires, getattr(ReduceOp, wired[0].op), result)
        out, copy_back = torch.empty_like(tensors[0]), wired[0].copy_back
        ratio = len(result) // 24
        for begin, end in ((0, 7), (7, 24)):
            part, target = result[begin * ratio : end * ratio], out[begin:end]
            target.copy_(part) if copy_back is None else copy_back(part, target)
        assert same(out, reduced(n, 24, dtype, name)), dtype


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
