"""`DURE_ISA`: the engine uses nothing above it, and computes the same bits with whatever it has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dure import native
from dure.comm.codes import dtype_code
from dure.comm.ops import ReduceOp
from dure.comm.ops import reducible_dtypes as dtypes_of
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs("engine")

# Without torch, which takes ten times as long as all else here.
CHILD = """
import ctypes, hashlib, random, sys
from dure import native
known = hashlib.sha256()
ones = [random.Random(seed).randbytes(8 * 333) for seed in range(3)]
sources = [ctypes.create_string_buffer(one, len(one)) for one in ones]
out = ctypes.create_string_buffer(8 * 333)
for word in sys.argv[1:]:
    dtype, reduction, count = map(int, word.split(","))
    out[:] = bytes(8 * 333)
    if not native.reduce(
        ctypes.addressof(out), [ctypes.addressof(s) for s in sources], dtype, reduction, count
    ):
        raise SystemExit(f"no kernel for {word}")
    known.update(out)
print(native.kernel_isa(), known.hexdigest(), native.crc32c(ones[0]))
"""


def best_up_to(most: str) -> str:
    """Return the best instruction set up to `most` that the kernel's list of features allows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    has = set(next((line for line in lines if line.startswith("flags")), "").split())
    avx2 = {"avx2", "f16c"} <= has
    if most == "avx512" and avx2 and {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= has:
        return "avx512"
    return "avx2" if most in {"avx2", "avx512"} and avx2 else "generic"


def started(most: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *words],
        env=os.environ | {"DURE_ISA": most},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_bounded_engines_agree_bit_for_bit():
    # Integers of every bit pattern: of floats, NaNs may differ, and they have tests of their own.
    names = ("uint8", "int8", "int16", "int32", "int64")
    words = [
        f"{dtype_code(dtype)},{op.code},{8 * 333 // dtype.itemsize}"
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.BXOR)
        for dtype in dtypes_of(op)
        if str(dtype).removeprefix("torch.") in names
    ]
    assert len(words) == 20
    children = {most: started(most, *sorted(words)) for most in ("generic", "avx2", "avx512", "")}
    said = {most: child.communicate(timeout=PATIENCE_S) for most, child in children.items()}
    assert all(not error for _, error in said.values()), said
    isas = {most: out.split()[0] for most, (out, _) in said.items()}
    assert isas == {
        "generic": "generic",
        "avx2": best_up_to("avx2"),
        "avx512": best_up_to("avx512"),
        "": best_up_to("avx512"),
    }
    assert len({tuple(out.split()[1:]) for out, _ in said.values()}) == 1, said


def test_unknown_limit_is_a_usage_error_that_names_the_variable():
    out, error = started("sse9").communicate(timeout=PATIENCE_S)
    assert not out
    assert error.splitlines()[-1].startswith("dure.errors.UsageError: DURE_ISA")


def test_limit_of_this_process_can_be_set_and_lifted():
    best = native.kernel_isa()
    engine = native._engine
    try:
        assert engine.limit_isa("generic")
        assert native.kernel_isa() == "generic"
        assert not engine.limit_isa("sse9")
        assert native.kernel_isa() == "generic"
    finally:
        assert engine.limit_isa("avx512")
    assert native.kernel_isa() == best_up_to("avx512") == best
