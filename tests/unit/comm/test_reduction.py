"""`reduce_in_order` and the wire dtypes of foreign engines, against plain Python."""

from __future__ import annotations

import pytest
import torch

from conformance.values import contribution, reduced, same
from dure.comm.backends.engine.wire import as_wire
from dure.comm.ops import ReduceOp, reducible_dtypes
from dure.comm.reduction import reduce_in_order

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
INTEGERS = {torch.int8, torch.uint8, torch.int32, torch.int64}
WIRED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
WIRED |= {torch.complex64, torch.complex128}
PLAIN = {torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}


def _dtypes(name: str) -> list[torch.dtype]:
    return sorted(reducible_dtypes(getattr(ReduceOp, name)), key=str)


@pytest.mark.parametrize("name", OPS)
def test_reduce_in_order_equals_plain_python(name):
    for dtype in _dtypes(name):
        for n in (1, 2, 5):
            tensors = [contribution(r, 24, dtype, name) for r in range(n)]
            out = torch.empty_like(tensors[0])
            reduce_in_order(tensors, getattr(ReduceOp, name), out)
            assert same(out, reduced(n, 24, dtype, name)), (dtype, n)


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


def test_out_may_be_one_of_the_inputs():
    tensors = [torch.arange(4.0) + r for r in range(3)]
    reduce_in_order(tensors, ReduceOp.SUM, tensors[1])
    assert tensors[1].tolist() == [3.0, 6.0, 9.0, 12.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nan_wins_min_and_max(dtype):
    a = torch.tensor([float("nan"), 1.0, -2.0], dtype=dtype)
    b = torch.tensor([5.0, float("nan"), 3.0], dtype=dtype)
    for name, last in (("MIN", -2.0), ("MAX", 3.0)):
        out = torch.empty_like(a)
        reduce_in_order([a, b], getattr(ReduceOp, name), out)
        assert out.isnan().tolist() == [True, True, False]
        assert out[2] == last
        assert as_wire(a, getattr(ReduceOp, name), 2) is None  # engines lose NaN


def test_sixteen_bit_floats_are_rounded_once():
    """1 + 2^-9 + 2^-9 is 1 + 2^-8 in float32, but 1 where bfloat16 rounds each step."""
    tiny = torch.tensor([2.0**-9], dtype=torch.bfloat16)
    tensors = [torch.ones(1, dtype=torch.bfloat16), tiny, tiny, tiny, tiny]
    out = torch.empty(1, dtype=torch.bfloat16)
    reduce_in_order(tensors, ReduceOp.SUM, out)
    assert out.item() == 1 + 2.0**-7
