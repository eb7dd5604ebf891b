"""`import dure`, the launcher and the command line do not load torch."""

import json
import subprocess
import sys

import pytest

MEASURE = """
import json, sys
before = set(sys.modules)
import {module}
new = set(sys.modules) - before
print(json.dumps({{
    "count": len(new),
    "heavy": sorted(new & {{"torch", "numpy", "sklearn", "asyncio"}}),
}}))
"""


def _load(module: str) -> dict:
    """Import `module` in a fresh interpreter; return what it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_import_dure_is_light():
    seen = _load("dure")
    assert seen["heavy"] == []
    assert seen["count"] < 60


LIGHT = ["dure.errors", "dure.env", "dure.trace", "dure.store", "dure.launch", "dure.native"]
LIGHT += ["dure.cli", "dure.cli.plan"]
LIGHT += [f"dure.cli.{command}.command" for command in ("run", "demo", "bench", "doctor")]


VIEWER = pytest.param("dure.viewer.server", marks=pytest.mark.needs("extra page"))


@pytest.mark.parametrize("module", [*LIGHT, VIEWER])
def test_what_only_starts_ranks_loads_neither_torch_nor_scikit_learn(module):
    assert not {"torch", "sklearn"} & set(_load(module)["heavy"])
