"""Networks that are really cut, between hosts that are network namespaces.

No test says how fast something is. The order of events decides: who trained, and who was dead then.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from tests.comm.namespace_hosts import Host
from tests.launch.faults.cuts import Cutting, cutting

pytestmark = [
    pytest.mark.needs("network namespaces"),
    pytest.mark.needs("engine"),
]

CONF = ("--rdzv-conf", "last_call_timeout=600")
ROUNDS = ("--no-zygote", "--nproc", "1", "--max-restarts", "3", *CONF)
ELASTIC = ("--no-zygote", "--nproc", "1", "--elastic", "--max-restarts", "3", *CONF)
SLOW = pytest.mark.slow


def ended_well(job: Cutting) -> None:
    """Let the program end, on all hosts, and look what was left."""
    job.finish()
    codes = [launcher.end() for launcher in job.launchers]
    assert codes == [0] * len(codes), job.report()
    job.check_one_at_a_time()
    job.check_nothing_left()


def ranks_on(host: Host) -> list[str]:
    """Return the rank processes of a host: those that were started with a rank's variables."""
    found: list[str] = []
    for line in host.inside():
        with contextlib.suppress(OSError):
            if b"\0LOCAL_RANK=" in Path(f"/proc/{line.split()[0]}/environ").read_bytes():
                found.append(line)
    return found


MODES = {"rounds": ROUNDS, "elastic": ELASTIC}
BOTH = ["rounds", pytest.param("elastic", marks=SLOW)]
NEITHER = [pytest.param(mode, marks=SLOW) for mode in MODES]


@pytest.mark.parametrize("mode", BOTH)
def test_a_hosts_ranks_are_dead_before_others_go_on_and_it_comes_back_as_a_new_member(
    tmp_path, mode
):
    with cutting(2, tmp_path) as job:
        job.start("--nnodes", "1:2", *MODES[mode], words=(mode,))
        job.trains(2)
        b = job.hosts[1]
        assert ranks_on(b)
        b.cut()
        at = time.monotonic()
        assert job.trains(1, at) == "a"
        if mode == "rounds":
            assert not ranks_on(b), job.report()
        else:  # survivors go on at once; who is cut off ends at its deadline
            job.wait_for(lambda: not ranks_on(b), "the ranks of b to end")
        b.mend()
        job.trains(2, time.monotonic())
        assert "b" not in job.led_by(at) or mode == "elastic"
        assert "looks for the job again" in job.launchers[1].text
        ended_well(job)


@pytest.mark.parametrize("mode", NEITHER)
def test_a_cut_of_one_second_changes_nothing(tmp_path, mode):
    with cutting(2, tmp_path) as job:
        job.start("--nnodes", "1:2", *MODES[mode], words=(mode,))
        job.trains(2)
        job.hosts[1].cut()
        time.sleep(1)
        job.hosts[1].mend()
        job.trains(2, time.monotonic())
        assert len({step.group for step in job.ledger()}) == 1, job.report()
        ended_well(job)
