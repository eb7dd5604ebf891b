"""A host that is cut off or stopped longer than its lease is given up, and comes back as another
member.

No test says how fast something is. The order of events decides: who trained, and who was dead then.
No two rounds may train at the same time. Hosts that are stopped for less are in
`test_faults_by_way`.
"""

import pytest

from tests.hosts.test_faults_by_way import processes, resume, stop
from tests.hosts.ways import HostJob, HostJobs

pytestmark = pytest.mark.needs("network namespaces", "engine")

SLOW_WITH_ETCD = [pytest.mark.slow, pytest.mark.needs("etcd")]


def hosts_of(job: HostJob, number: int) -> set[str]:
    """Return the hosts whose ranks made steps in a round."""
    return {host for each, host, _ in job.steps() if each == number}


def steps_of_the_past(job: HostJob) -> list[tuple[int, str, int]]:
    """Return the steps that were made after one of a later round."""
    latest, found = 0, []
    for step in job.steps():
        latest = max(latest, step[0])
        if step[0] < latest:
            found.append(step)
    return found


def num_ranks_on_b(job: HostJob) -> int:
    """Count the ranks on host b, which look as the process that they are forked from."""
    return sum("forking.py" in line for line in job.hosts[1].inside()) - 1


@pytest.mark.parametrize(
    ("way", "is_cut"),
    [
        ("dure run", True),
        ("dure run", False),
        pytest.param("etcd", False, marks=SLOW_WITH_ETCD),
    ],
)
def test_a_host_that_was_given_up_returns_and_rounds_never_overlap(
    way: str, is_cut: bool, jobs: HostJobs
) -> None:
    job = jobs.start_reducing(way, nnodes="1:2", lease_s=4, max_restarts=3)
    host_b = processes(job)
    if is_cut:
        assert num_ranks_on_b(job) == 2
        job.hosts[1].cut()
        job.wait_for_round(1)
        assert num_ranks_on_b(job) == 0, job.printed()
        job.hosts[1].mend()
    else:
        stop(host_b)
        job.wait_for_round(1)
        resume(host_b)
    job.wait_for(lambda: hosts_of(job, 2) == {"a", "b"}, "a round of both")
    (job.folder / "finish").touch()
    assert job.codes() == [0, 0], job.printed()
    assert hosts_of(job, 1) == {"a"}
    late = steps_of_the_past(job)
    if is_cut:
        assert late == []
    else:  # a rank may have been stopped between the end of a step and the line about it
        assert len(late) == len(set(late)), job.steps()
        assert all(number == 0 and host == "b" for number, host, _ in late), late
    assert "looks for the job again" in job.printed(1)
    jobs.check_nothing_left()
