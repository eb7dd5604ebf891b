"""Two jobs on the same hosts at the same time."""

from __future__ import annotations

import pytest

from tests.hosts.ways import HostJobs

pytestmark = pytest.mark.needs("network namespaces", "engine", "sshd")

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
