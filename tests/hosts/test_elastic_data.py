"""Elastic training over hosts: one host comes and one is lost; every sample is had exactly once."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.elastic_data import SAMPLES
from tests.hosts.ways import HostJobs

pytestmark = pytest.mark.needs("network namespaces", "engine")


@pytest.mark.parametrize("fault", ["killed", pytest.param("power", marks=pytest.mark.slow)])
def test_each_sample_once_while_a_host_comes_and_one_is_lost(fault: str, tmp_path: Path) -> None:
    jobs = HostJobs(tmp_path, "tests.hosts.elastic_data")
    with jobs.stack:
        soon: dict[str, Any] = {"PET_RDZV_CONF": "last_call_timeout=1"}
        job = jobs.start("elastic", nnodes="1:3", num_hosts=3, each=1, later=[2], **soon)
        job.wait_for((job.folder / "waits 3").exists, "the fourth step")
        job.start(2)
        job.wait_for((job.folder / "waits 6").exists, "the seventh step")
        if fault == "power":
            job.hosts[1].cut()  # none of its last words gets through
        job.hosts[1].kill()
        assert job.codes(0) + job.codes(2) == [0, 0], job.printed()
        jobs.check_nothing_left()
    for host in "ac":
        samples, sizes = json.loads((job.folder / f"had on {host}").read_text())
        assert sizes == [3 * [2] + 3 * [3] + 5 * [2], 13 * [2]]
        assert [sorted(epoch) for epoch in samples] == 2 * [list(range(SAMPLES))]
        assert samples[0] != samples[1], "in another order"
