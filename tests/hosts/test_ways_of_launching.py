"""One job in each way of launching, on hosts of several kinds of networks.

Its program (`job.py`) runs collectives and RPC, and compares DDP and FSDP with one process;
`plugin.py` does the same in stock torch, on the backend "dure".
"""

from pathlib import Path

import pytest

from tests.hosts.ways import HostJobs

pytestmark = pytest.mark.needs("network namespaces", "sshd", "engine", "compiler")

FIREWALL = pytest.mark.needs("firewalls")
ETCD = pytest.mark.needs("etcd")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "network"),
    [
        ("torchrun", "short packets"),
        ("torchrun", "stock torch"),
        ("dure run", "Debian's names"),
        ("dure run", "other clock"),
        ("ssh", "plain"),
        pytest.param("etcd", "IPv6", marks=ETCD),
        ("static variables", "Debian's names"),
        pytest.param("static variables", "IPv6", marks=SLOW),
        pytest.param("static variables", "short packets", marks=SLOW),
        pytest.param("torchrun", "Debian's names", marks=SLOW),
        pytest.param("torchrun", "IPv6", marks=SLOW),
        pytest.param("dure run", "IPv6", marks=SLOW),
        pytest.param("dure run", "short packets", marks=SLOW),
        pytest.param("dure run", "lost packets", marks=[FIREWALL, SLOW]),
        pytest.param("etcd", "plain", marks=[ETCD, SLOW]),
    ],
)
def test_ranks_compute_what_one_process_computes(way: str, network: str, tmp_path: Path):
    plugin = network == "stock torch"
    jobs = HostJobs(tmp_path, "tests.hosts.plugin" if plugin else "tests.hosts.job")
    with jobs.stack:
        job = jobs.start(way, "plain" if plugin else network)
        codes = job.codes()
        for rank in range(4):
            assert f"rank {rank}: right" in job.printed(), job.printed()
        if way != "torchrun":  # its launchers sometimes fail after their ranks have ended
            assert not any(codes), job.printed()
