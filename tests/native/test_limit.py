"""`DURE_ISA`: the engine uses nothing above it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dure import native
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs("engine")


def best_up_to(most: str) -> str:
    """Return the best instruction set up to `most` that the kernel's list of features allows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    has = set(next((line for line in lines if line.startswith("flags")), "").split())
    avx2 = {"avx2", "f16c"} <= has
    if most == "avx512" and avx2 and {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= has:
        return "avx512"
    return "avx2" if most in {"avx2", "avx512"} and avx2 else "generic"


def test_unknown_limit_is_a_usage_error_that_names_the_variable():
    ended = subprocess.run(
        [sys.executable, "-c", "import dure.native"],
        env=os.environ | {"DURE_ISA": "sse9"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.stderr.splitlines()[-1].startswith("dure.errors.UsageError: DURE_ISA")


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
