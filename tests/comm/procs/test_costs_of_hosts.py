"""What a hybrid group costs a rank as hosts are added: connections in proportion, threads not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("engine")

SCALE = Path(__file__).parents[3] / "benchmarks" / "scale"


def _figures(ranks: int) -> dict[str, float]:
    """Make and use a group over pretended hosts of two ranks, by the row of benchmarks/scale."""
    command = [sys.executable, str(SCALE), "--measure", "5", str(ranks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=240, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_descriptors_grow_with_the_ranks_and_threads_do_not() -> None:
    few, more = _figures(4), _figures(12)
    # Three times the ranks have twice the descriptors (35 and 67), not nine times as many.
    assert more["descriptors of the group"] <= 2.5 * few["descriptors of the group"]
    assert more["threads of the group"] == few["threads of the group"]
