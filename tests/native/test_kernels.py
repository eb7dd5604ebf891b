"""Kernels against torch: every value of every small format, and every reduction.

Each test goes through the instruction sets that this machine has. That they agree for all other
dtypes is in `csrc/tests/test_kernels.cpp`, what the best of them computes in the conformance suite.
"""

import pytest
import torch

from dure import native
from dure.comm.codes import dtype_code
from dure.comm.ops import ReduceOp

pytestmark = pytest.mark.needs("engine")

EIGHT = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
SIXTEEN = [torch.float16, torch.bfloat16]
OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
MIN_MAX = [ReduceOp.MIN, ReduceOp.MAX]  # which zero is the smaller one is nowhere said


@pytest.fixture
def isas():
    """Yield the instruction sets, each selected until the next."""
    best = native.kernel_isa()
    yield (isa for isa in ("generic", "avx2", "avx512") if native.select_kernel_isa(isa))
    native.select_kernel_isa(best)


def reduced(tensors, op):
    out = torch.empty_like(tensors[0])
    addresses = [t.data_ptr() for t in tensors]
    assert native.reduce(out.data_ptr(), addresses, dtype_code(out.dtype), op.code, out.numel())
    return out


def assert_same_bits(got, expected, signed_zero=True):
    """Equal bit for bit, but for which of its NaNs a format shows; zeros may have no sign."""
    assert got.dtype == expected.dtype
    whole = {1: torch.uint8, 2: torch.int16}[got.element_size()]
    same = got.view(whole) == expected.view(whole)
    same |= got.float().isnan() & expected.float().isnan()
    if not signed_zero:
        same |= (got.float() == 0) & (expected.float() == 0)
    assert same.all(), (got[~same][:5], expected[~same][:5])


def all_pairs(dtype):
    every = torch.arange(256, dtype=torch.uint8)
    return every.repeat_interleave(256).view(dtype), every.repeat(256).view(dtype)


def by_torch(op, a, b):
    x, y = a.float(), b.float()
    result = {
        "SUM": lambda: x + y,
        "AVG": lambda: (x + y) / 2,
        "PRODUCT": lambda: x * y,
        "MIN": lambda: torch.minimum(x, y),
        "MAX": lambda: torch.maximum(x, y),
    }[op.name]()
    return result.to(a.dtype)


@pytest.mark.parametrize("dtype", [*EIGHT, torch.float8_e8m0fnu], ids=str)
def test_eight_bit_floats_agree_with_torch_for_all_pairs(dtype, isas):
    a, b = all_pairs(dtype)
    expected = {op: by_torch(op, a, b) for op in OPS}
    for _ in isas:
        for op in OPS:
            assert_same_bits(reduced([a, b], op), expected[op], op not in MIN_MAX)


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_sixteen_bit_floats_agree_with_torch_for_all_values(dtype, isas):
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    shuffled = torch.randperm(65536, generator=torch.Generator().manual_seed(3))
    for _ in isas:
        for op in OPS:
            for b in (every, every[shuffled], every.flip(0)):
                expected = by_torch(op, every, b)
                assert_same_bits(reduced([every, b], op), expected, op not in MIN_MAX)


@pytest.fixture
def flushing():
    """Take subnormal float32 numbers for zero in this thread, as `set_flush_denormal` does."""
    assert torch.set_flush_denormal(True), "x86-64 and arm64 have it"
    yield torch.set_flush_denormal
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [*EIGHT, torch.float16], ids=str)
def test_subnormal_numbers_of_small_formats_are_kept_where_those_of_float32_are_flushed(
    dtype, isas, flushing
):
    """As float32 they are normal numbers, and so are their sums, means and products."""
    flushing(False)
    if dtype.itemsize == 1:
        a, b = all_pairs(dtype)
    else:
        a = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
        b = a.view(torch.uint16)[torch.arange(65536) ^ 0x7C00 ^ 5].view(dtype)
    expected = {op: by_torch(op, a, b) for op in OPS}
    for _ in isas:
        for op in OPS:
            flushing(True)
            got = reduced([a, b], op)
            flushing(False)
            assert_same_bits(got, expected[op], op not in MIN_MAX)
