"""The endpoint: two jobs that have the same one, its host dies, or its clock differs.

A launcher that dies there is in `launch.faults.test_agent_deaths`, and with etcd in
`test_link_etcd` beside it.
"""

import pytest

from tests.hosts.ways import HostJobs

pytestmark = pytest.mark.needs("network namespaces", "engine")

AT = "10.213.7.1:29400"


def test_a_second_job_at_a_taken_endpoint_is_refused_or_waits_and_says_so(jobs: HostJobs) -> None:
    first = jobs.start_reducing("dure run")
    other = jobs.start("dure run", beside=first, PET_RDZV_ID="other")
    assert other.codes() == [1, 1]
    for host in (0, 1):
        assert f"tcp://{AT} refused this process" in other.printed(host)
        assert "If another job has this port, use another one" in other.printed(host)
    spare = jobs.start("dure run", beside=first)
    waits = f"another launcher of this host takes part in the job at {AT}; this one waits as"
    spare.wait_for(lambda: spare.printed().count(waits) == 2, waits)
    (first.folder / "finish").touch()
    assert first.codes() + spare.codes() == [0, 0, 0, 0], spare.printed()
    assert spare.printed().count("the job has ended; this host had no part in it") == 2
    assert other.steps() == spare.steps() == []


def test_without_etcd_the_job_ends_with_its_coordinators_host_and_says_what_to_do(
    jobs: HostJobs,
) -> None:
    job = jobs.start_reducing("dure run", nnodes="1:2", lease_s=4, max_restarts=3)
    job.hosts[0].kill()
    assert job.codes(1) == [1]
    assert "the coordinator's launcher has ended; its ranks were ended" in job.printed(1)
    assert "the job's coordinator was lost" in job.printed(1)
    assert "Start the job again on all hosts" in job.printed(1)
    assert {number for number, _, _ in job.steps()} == {0}, "no restart"
    jobs.check_nothing_left()


@pytest.mark.slow
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
