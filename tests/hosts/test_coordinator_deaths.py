"""The launcher at the endpoint dies, or its host: who says so, and whether the job goes on.

A coordinator whose cable is cut first, so that nothing is refused at its port, is in
`launch.faults.test_membership_network_cuts`.
"""

from __future__ import annotations

import pytest

from tests.hosts.ways import HostJobs

pytestmark = pytest.mark.needs("network namespaces", "etcd", "engine", "sshd")

SLOW = pytest.mark.slow
LAUNCHER = ("dure.cli", "--nnodes")


@pytest.mark.parametrize(
    ("dies", "restarts"),
    [
        ("launcher", 0),
        pytest.param("launcher", 3, marks=SLOW),
        pytest.param("host", 3, marks=SLOW),
    ],
)
def test_without_etcd_the_job_ends_with_its_coordinator_and_says_what_to_do(
    dies: str, restarts: int, jobs: HostJobs
) -> None:
    job = jobs.start_reducing("dure run", nnodes="1:2", lease_s=4, max_restarts=restarts)
    if dies == "host":
        job.hosts[0].kill()
    else:
        job.kill(0, *LAUNCHER)
    assert job.codes(1) == [1]
    assert "the coordinator's launcher has ended; its ranks were ended" in job.printed(1)
    assert "the job's coordinator was lost" in job.printed(1)
    assert "Start the job again on all hosts" in job.printed(1)
    assert {number for number, _, _ in job.steps()} == {0}, "no restart"
    jobs.check_nothing_left()


def test_with_etcd_the_others_go_on_without_any_host(jobs: HostJobs) -> None:
    job = jobs.start_reducing("etcd", nnodes="1:2", lease_s=4, max_restarts=3)
    job.kill(0, *LAUNCHER)
    job.wait_for_round(1)
    (job.folder / "finish").touch()
    assert job.codes(1) == [0]
    assert "lost a (its launcher was killed)" in job.printed(1), job.printed(1)
    assert "round 1 starts with 2 ranks on b (restarts: 1 of 3)" in job.printed(1)
    assert {host for number, host, _ in job.steps() if number == 1} == {"b"}


@SLOW
def test_with_etcd_and_without_restarts_the_lost_host_is_named(jobs: HostJobs) -> None:
    job = jobs.start_reducing("etcd", lease_s=4)
    job.kill(0, *LAUNCHER)
    assert job.codes(1) == [1]
    assert "lost a (its launcher was killed)" in job.printed(1), job.printed(1)
    assert "no restarts are allowed (--max-restarts), so the job ends" in job.printed(1)


@SLOW
def test_clocks_an_hour_apart_change_neither_leases_nor_restarts(jobs: HostJobs) -> None:
    job = jobs.start_reducing("dure run", "other clock", "1:2", lease_s=4, max_restarts=3)
    job.kill_rank(job.ranks_of("b")[-1], host=1)
    job.wait_for_round(1)
    job.hosts[1].kill()
    job.wait_for_round(2)
    (job.folder / "finish").touch()
    assert job.codes(0) == [0], job.printed(0)
    hosts = [{host for number, host, _ in job.steps() if number == n} for n in (1, 2)]
    assert hosts == [{"a", "b"}, {"a"}]
