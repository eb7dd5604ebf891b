"""Stock torch.distributed on "dure" over hosts, started by torchrun: values, and a killed rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.ways import HostJobs
from tests.waiting import until

pytestmark = pytest.mark.needs("network namespaces", "engine")


def test_ranks_compute_what_one_process_computes(tmp_path: Path):
    jobs = HostJobs(tmp_path, "tests.hosts.plugin")
    with jobs.stack:
        job = jobs.start("torchrun")
        job.codes()  # not looked at: torchrun's launchers sometimes fail after their ranks
        for rank in range(4):
            assert f"rank {rank}: right" in job.printed(), job.printed()


@pytest.mark.slow
def test_a_killed_rank_is_named_on_all_hosts(tmp_path: Path):
    jobs = HostJobs(tmp_path, "tests.hosts.plugin", "reduce")
    with jobs.stack:
        job = jobs.start("torchrun")
        up = tmp_path / "job1"
        until(lambda: len(list(up.glob("up *"))) == 4, lambda: f"ranks\n{job.printed()}")
        pid = (up / "up 3").read_text()
        assert job.hosts[1].start_any(["kill", "-KILL", pid], {}).wait() == 0
        assert all(job.codes(0))
        printed = job.printed(0)
        assert "PeerLost" in printed, printed
        named = ("rank 3", "ranks 2, 3")  # torchrun kills rank 2, too, and at once
        assert any(name in printed for name in named), printed
        jobs.check_nothing_left()
