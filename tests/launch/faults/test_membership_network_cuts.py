"""A network that is really cut, between hosts that are network namespaces.

No test says how fast something is. The order of events decides: who trained, and who was dead then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.ways import HostJob, HostJobs

pytestmark = pytest.mark.needs("network namespaces", "engine")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[HostJob]:
    """A job of one host or two, of which both reduce."""
    jobs = HostJobs(tmp_path, "tests.hosts.reducing")
    with jobs.stack:
        job = jobs.start_reducing("dure run", nnodes="1:2", lease_s=4, max_restarts=3)
        yield job
        (job.folder / "finish").touch()
        assert job.codes() == [0, 0], job.printed()
        rounds = [number for number, _, _ in job.steps()]
        assert rounds == sorted(rounds)  # no two rounds ever trained at the same time
        jobs.check_nothing_left()


def num_ranks_on_b(job: HostJob) -> int:
    """Count the ranks on host b, which look as the process that they are forked from."""
    return sum("forking.py" in line for line in job.hosts[1].inside()) - 1


def hosts_of(job: HostJob, number: int) -> set[str]:
    """Return the hosts whose ranks made steps in a round."""
    return {host for each, host, _ in job.steps() if each == number}


def test_a_hosts_ranks_are_dead_before_others_go_on_and_it_comes_back_as_a_new_member(
    job: HostJob,
) -> None:
    assert num_ranks_on_b(job) == 2
    job.hosts[1].cut()
    job.wait_for_round(1)
    assert num_ranks_on_b(job) == 0, job.printed()
    job.hosts[1].mend()
    job.wait_for(lambda: hosts_of(job, 2) == {"a", "b"}, "a round of both hosts")
    assert hosts_of(job, 1) == {"a"}
    assert "looks for the job again" in job.printed(1)


@pytest.mark.slow
def test_a_cut_of_one_second_changes_nothing(job: HostJob) -> None:
    job.hosts[1].cut()
    time.sleep(1)
    job.hosts[1].mend()
    steps = len(job.steps())
    job.wait_for(lambda: len(job.steps()) > steps + 40, "steps")
    assert {number for number, _, _ in job.steps()} == {0}
