"""The program of docs/clusters.md for Ray, run by a Ray of this machine with two nodes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed, and is no dependency of Dure")
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="this Ray has no test cluster")

DOCUMENT = Path(__file__).parents[2] / "docs" / "clusters.md"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a busy Ray starts slowly


def test_the_documented_program_trains_on_actors_of_two_nodes(tmp_path: Path) -> None:
    section = DOCUMENT.read_text().split("\n## Ray\n")[1].split("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    program = tmp_path / "actors.py"
    program.write_text(found[1])
    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        results = runpy.run_path(str(program))["main"](3)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert sorted(rank for rank, _ in results) == [0, 1, 2]
    assert len({tuple(weights) for _, weights in results}) == 1
