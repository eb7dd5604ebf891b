"""Each fault of a host in each way of launching: who is named, and that all of it ends.

Two ranks on each of two hosts reduce; host b, or something on it, fails.
"""

import contextlib
import signal
import subprocess
import time

import psutil
import pytest

from tests.hosts import networks
from tests.hosts.ways import WAYS, HostJob, HostJobs
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("firewalls", "sshd", "etcd", "engine"),
]

STOPPED_S = 10.0


def processes(job: HostJob, host: int = 1) -> list[psutil.Process]:
    """Return all processes on a host; last those that only wait for them, outside of it."""
    words = ["ip", "netns", "pids", job.hosts[host].net]
    pids = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    found = [psutil.Process(int(pid)) for pid in pids]
    return sorted(found, key=lambda process: process.name() == "nsenter")


def stop(found: list[psutil.Process]) -> None:
    """Stop processes, all but those that stop themselves when their children stop."""
    for process in found:
        if process.name() != "nsenter":
            process.send_signal(signal.SIGSTOP)


def resume(found: list[psutil.Process]) -> None:
    """Let processes continue; some may be killed by those that do so earlier."""
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def stop_for(found: list[psutil.Process], seconds: float) -> None:
    """Stop processes for some time."""
    stop(found)
    time.sleep(seconds)
    resume(found)


def ends_naming(job: HostJob, *names: str) -> None:
    """Wait until host a's part of a job has ended, and check that it names the culprit somehow."""
    assert all(job.codes(0))
    assert any(name in job.printed(0) for name in names), job.printed(0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", ["power", "cable", "one direction"])
def test_a_lost_host_is_named_on_the_other(fault: str, way: str, jobs: HostJobs):
    job = jobs.start_reducing(way, lease_s=4)
    if fault == "power":
        job.hosts[1].kill()
    elif fault == "cable":
        job.hosts[1].cut()
    else:
        networks.stop_hearing(job.hosts[1])
    ends_naming(job, "PeerLost: rank 2", "host b", "lost b (")
    if fault == "cable":
        job.hosts[1].mend()
        jobs.check_nothing_left()


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_rank_is_named_on_all_hosts(way: str, jobs: HostJobs):
    job = jobs.start_reducing(way, lease_s=4)
    first, last = job.ranks_of("b")
    job.kill_rank(last, host=1)
    # torchrun kills the other one, too
    ends_naming(job, f"rank {last}", f"ranks {first}, {last}")
    jobs.check_nothing_left()


@pytest.mark.parametrize("way", WAYS)
def test_a_host_that_is_stopped_for_seconds_loses_nothing(way: str, jobs: HostJobs):
    job = jobs.start_reducing(way, lease_s=30)
    stop_for(processes(job), STOPPED_S)
    (job.folder / "finish").touch()
    assert not any(job.codes()), job.printed()


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.2, 0.4])
def test_a_coordinator_that_is_stopped_while_ranks_start_costs_a_restart(
    delay_s: float, jobs: HostJobs
):
    job = jobs.start("dure run", PET_MAX_RESTARTS="3", DURE_SILENCE="4")
    until(lambda: any("forking" in " ".join(each.cmdline()) for each in processes(job, 0)))
    time.sleep(delay_s)
    stop_for(processes(job, 0), 9.0)
    job.wait_until_up()
    (job.folder / "finish").touch()
    assert not any(job.codes()), job.printed()
    jobs.check_nothing_left()
