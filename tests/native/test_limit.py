"""`DURE_ISA`: the engine uses nothing above it, and computes the same bits with whatever it has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dure import native
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
