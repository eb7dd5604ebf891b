"""The program of docs/clusters.md for Ray, run by a Ray of this machine with two nodes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

DOCUMENT = Path(__file__).parents[3] / "docs" / "clusters.md"

DRIVER = """
import json, runpy, sys
import ray
from ray.cluster_utils import Cluster
head = {"num_cpus": 2, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
try:
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    print(json.dumps(runpy.run_path(sys.argv[1])["main"](3)))
finally:
    ray.shutdown()
    cluster.shutdown()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="needs Ray: not installed, and not a dependency of Dure",
    ),
]


def test_the_documented_program_trains_on_actors_of_two_nodes(tmp_path: Path) -> None:
    section = DOCUMENT.read_text().split("\n## Ray\n")[1].split("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    program = tmp_path / "actors.py"
    program.write_text(found[1])
    words = [sys.executable, "-c", DRIVER, program]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout.splitlines()[-1])
    assert sorted(rank for rank, _ in results) == [0, 1, 2]
    assert len({tuple(weights) for _, weights in results}) == 1
