"""Jobs whose state is in etcd: real members, launchers and ranks, of which some are killed."""

import os
import signal
from base64 import b64decode, b64encode
from typing import Any

import pytest

from tests.launch.faults.agents import Crew
from tests.store.procs import etcd

pytestmark = pytest.mark.needs("etcd")
OPEN = ("--nnodes", "1:2", "--nproc", "1", "--max-restarts", "3")
CONF = "last_call_timeout=600"


def flags(cluster: etcd.Etcd, conf: str = CONF) -> tuple[str, ...]:
    where = ("--rdzv-backend", "etcd", "--rdzv-endpoint", cluster.names, "--rdzv-id", "job")
    return (*where, "--rdzv-conf", conf)


def keys(cluster: etcd.Etcd) -> list[str]:
    """Return what the job has in etcd."""
    words = {"key": "/dure", "range_end": "/durf"}
    body = {name: b64encode(word.encode()).decode() for name, word in words.items()}
    found: Any = cluster.ask("kv/range", body, -1).get("kvs", ())
    return [b64decode(each["key"]).decode() for each in found]


def test_no_hosts_loss_ends_the_job_nor_does_a_members(crew: Crew) -> None:
    with etcd.etcd(3) as cluster:
        for name in "ab":
            crew.start_alone(name, *OPEN, *flags(cluster))
        first = crew.round(0, 2)
        assert "etcd://" in first[0].store
        assert first[0].store == first[1].store
        cluster.kill(0)
        os.kill(first[1].pid, signal.SIGKILL)
        again = crew.round(1, 2)
        step = crew.advance()
        node_0 = next(host for host in crew.hosts if host.name == again[0].host)
        node_0.process.kill()
        third = crew.round(2, 1)
        assert third[0].host != node_0.name
        assert third[0].step >= step
        crew.start_alone("c", *OPEN, *flags(cluster))
        assert "c" in {start.host for start in crew.round(3, 2)}
        crew.finish()
        assert [host.end() for host in crew.hosts if host is not node_0] == [0, 0]
        other = next(host for host in crew.hosts if host.name == third[0].host)
        assert "its launcher was killed" in other.err
        assert keys(cluster) == []


def test_what_a_job_of_the_same_name_has_left_is_not_the_next_ones(crew: Crew) -> None:
    with etcd.etcd() as cluster:
        one = crew.start_alone("a", *OPEN[2:], *flags(cluster))
        first = crew.round(0, 1)
        one.process.kill()
        crew.wait_for(lambda: not [k for k in keys(cluster) if "/members/" in k], "the reaper")
        (crew.folder / "start 0 0 1 a").unlink()
        crew.start_alone("b", *OPEN[2:], *flags(cluster))
        again = crew.round(0, 1)
        assert again[0].store != first[0].store
        crew.finish()
        assert crew.hosts[1].end() == 0
        assert keys(cluster) == []


@pytest.mark.slow
def test_when_etcd_is_lost_for_good_the_job_ends_and_says_so(crew: Crew) -> None:
    with etcd.etcd() as cluster:
        for name in "ab":
            crew.start_alone(name, *OPEN, *flags(cluster, "last_call_timeout=600,join_timeout=3"))
        crew.round(0, 2)
        cluster.kill(0)
        assert [host.end() for host in crew.hosts] == [1, 1]
        for host in crew.hosts:
            assert "etcd was lost" in host.err, host.err
