"""`import dure`, the launcher and the command line do not load torch."""

import json
import subprocess
import sys

import pytest

MEASURE = """
import json, sys, time
before = set(sys.modules)
start = time.perf_counter()
import {module}
elapsed = time.perf_counter() - start
new = set(sys.modules) - before
print(json.dumps({{
    "ms": elapsed * 1e3,
    "count": len(new),
    "heavy": sorted(new & {{"torch", "numpy", "sklearn", "asyncio"}}),
}}))
"""


def _load(module: str) -> dict:
    """Import `module` in a fresh interpreter; say what it loaded and how long it took."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE.format(module=module)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return json.loads(done.stdout)


def test_import_dure_is_light():
    seen = min((_load("dure") for _ in range(3)), key=lambda s: s["ms"])
    print(f"import dure: {seen['ms']:.1f} ms, {seen['count']} modules")
    assert seen["heavy"] == []
    # The time is printed, not asserted: modules can be counted on a busy machine too.
    assert seen["count"] < 60


@pytest.mark.parametrize("module", ["dure.errors", "dure.env", "dure.trace", "dure.store"])
def test_low_layers_load_without_torch(module):
    assert "torch" not in _load(module)["heavy"]


@pytest.mark.parametrize("module", ["dure.launch", "dure.cli", "dure.native", "dure.viewer.server"])
def test_launcher_and_command_line_load_without_torch(module):
    assert "torch" not in _load(module)["heavy"]
