"""One job in each way of launching, on hosts of several kinds of networks.

Its program (`job.py`) runs collectives and RPC, and compares DDP and FSDP with one process. All
jobs run at the same time, each on a network of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.ways import HostJob, HostJobs

pytestmark = pytest.mark.needs("network namespaces", "sshd", "engine", "compiler")

FIREWALL = pytest.mark.needs("firewalls")
ETCD = pytest.mark.needs("etcd")
CASES = [
    ("static variables", "IPv6"),
    ("static variables", "Debian's names"),
    ("torchrun", "plain"),
    ("dure run", "IPv6"),
    ("dure run", "Debian's names"),
    ("dure run", "short packets"),
    ("dure run", "other clock"),
    ("ssh", "plain"),
    pytest.param("etcd", "plain", marks=ETCD),
    pytest.param("dure run", "lost packets", marks=[FIREWALL, pytest.mark.slow]),
    pytest.param("static variables", "short packets", marks=pytest.mark.slow),
    pytest.param("torchrun", "Debian's names", marks=pytest.mark.slow),
    pytest.param("torchrun", "IPv6", marks=pytest.mark.slow),
    pytest.param("etcd", "IPv6", marks=[ETCD, pytest.mark.slow]),
]


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], HostJob]]:
    """Start the jobs of all tests that run."""
    started = HostJobs(tmp_path_factory.mktemp("jobs"), "tests.hosts.job")
    items = [item for item in request.session.items if item.path == request.path]
    cases = [(item.callspec.params["way"], item.callspec.params["network"]) for item in items]
    with started.stack:
        yield {case: started.start(*case) for case in cases}


@pytest.mark.parametrize(("way", "network"), CASES)
def test_ranks_compute_what_one_process_computes(
    way: str, network: str, jobs: dict[tuple[str, str], HostJob]
):
    job = jobs[way, network]
    codes = job.codes()
    for rank in range(4):
        assert f"rank {rank}: right" in job.printed(), job.printed()
    if way != "torchrun":  # its launchers sometimes fail after their ranks have ended
        assert not any(codes), job.printed()
