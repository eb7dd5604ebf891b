"""A host that is stopped longer than its lease is given up, and comes back as another member.

No two rounds may train at the same time. Hosts that are cut off instead are in
`launch.faults.test_membership_network_cuts`, hosts that are stopped for less in
`test_faults_by_way`.
"""

from __future__ import annotations

import pytest

from tests.hosts.test_faults_by_way import processes, resume, stop
from tests.hosts.ways import HostJob, HostJobs

pytestmark = pytest.mark.needs("network namespaces", "etcd", "engine", "sshd")

SLOW = pytest.mark.slow


def steps_of_the_past(job: HostJob) -> list[tuple[int, str, int]]:
    """Return the steps that were made after one of a later round."""
    latest, found = 0, []
    for step in job.steps():
        latest = max(latest, step[0])
        if step[0] < latest:
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("way", "nnodes"),
    [
        ("dure run", "1:2"),
        pytest.param("dure run", "2", marks=SLOW),
        pytest.param("etcd", "1:2", marks=SLOW),
        pytest.param("etcd", "2", marks=SLOW),
    ],
)
def test_a_host_that_was_given_up_returns_and_rounds_never_overlap(
    way: str, nnodes: str, jobs: HostJobs
) -> None:
    job = jobs.start_reducing(way, nnodes=nnodes, lease_s=4, max_restarts=3)
    waits = "lost b (nothing was heard of it for 6 s); waiting at 10.213.7.1:"
    assert job.steps()[0][0] == 0
    host_b = processes(job)
    stop(host_b)
    alone = nnodes == "1:2"
    if alone:
        job.wait_for_round(1)
    else:
        job.wait_for(lambda: waits in job.printed(0), "a host that waits")
    resume(host_b)
    again = 2 if alone else 1
    job.wait_for(
        lambda: {h for n, h, _ in job.steps() if n == again} == {"a", "b"}, "a round of both"
    )
    (job.folder / "finish").touch()
    assert job.codes() == [0, 0], job.printed()
    if alone:
        assert {host for number, host, _ in job.steps() if number == 1} == {"a"}
    # A rank may have been stopped between the end of a step and the line about it.
    late = steps_of_the_past(job)
    assert len(late) == len(set(late)), job.steps()
    assert all(number == 0 and host == "b" for number, host, _ in late), late
    assert "looks for the job again" in job.printed(1)
    jobs.check_nothing_left()
