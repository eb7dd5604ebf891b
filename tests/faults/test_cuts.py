"""Networks that are really cut, between hosts that are network namespaces.

No test says how fast something is, but for the limits that docs/restarts.md, docs/elastic.md and
docs/hosts.md state, with room for a loaded machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from dure.native import available
from faults.cuts import Cutting, cutting, wires
from procs.hosts import why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
    pytest.mark.skipif(not available()[0], reason=available()[1] or "-"),
    pytest.mark.timeout(240),
]

CONF = ("--rdzv-conf", "last_call_timeout=60")
ROUNDS = ("--nproc", "1", "--max-restarts", "3", *CONF)
SLOW = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def cut_off(job: Cutting, *names: str) -> float:
    """Cut hosts off; return when that was done."""
    for host in job.hosts:
        if host.name in names:
            host.cut()
    return time.monotonic()


def mended(job: Cutting, *names: str) -> float:
    for host in job.hosts:
        if host.name in names:
            host.mend()
    return time.monotonic()


def ended_well(job: Cutting) -> None:
    """Let the program end, on all hosts, and look what was left."""
    job.finish()
    codes = [launcher.end(40) for launcher in job.launchers]
    assert codes == [0] * len(codes), job.report()
    job.check_one_at_a_time()
    job.check_nothing_left()


# ---- short ones --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ends:
    """How a job without restarts ended: exit codes, what launchers and ranks said, and when."""

    first: str  # the host of rank 0
    codes: list[int]
    after_s: list[float]
    texts: list[str]
    errors: list[tuple[str, str]]


def _plain(folder: Path) -> Ends:
    """Cut host b off in the middle of a plain job's all_reduces."""
    with cutting(2, folder, "plain") as job:
        job.start("--nnodes", "2", "--nproc", "1", words=("rounds",))
        first = job.trains(2)
        at = cut_off(job, "b")
        codes = [launcher.end(90) for launcher in job.launchers]
        job.check_nothing_left()
        said = [(host, what) for _, host, _, what in job.said() if not what.startswith("up")]
        after_s = [launcher.ended_at - at for launcher in job.launchers]
        return Ends(first, codes, after_s, [launcher.text for launcher in job.launchers], said)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How a plain job that was cut in two ended."""
    return _plain(tmp_path_factory.mktemp("plain"))


def test_a_plain_job_ends_on_both_sides_and_each_names_the_other(ends: Ends):
    assert 0 not in ends.codes, ends
    assert max(ends.after_s) < 25, "3 s for the ranks, 5 s and 2 s for the launchers, when quiet"
    lost = {host: f"PeerLost {int(host == ends.first)}" for host in "ab"}
    assert sorted(ends.errors) == sorted(lost.items()), ends
    assert "lost b" in ends.texts[0]
    assert "lost a" in ends.texts[1]


# ---- drills: restart rounds --------------------------------------------------------------------

MODES = {"rounds": ROUNDS}


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW) for mode in MODES])
@pytest.mark.parametrize(
    ("hosts", "victim"),
    [
        pytest.param(2, "", id="half without the first rank"),
        pytest.param(3, "c", id="one of three"),
        pytest.param(3, "a", id="the store's host of three"),
    ],
)
def test_a_host_cut_off_for_20_s_waits_and_comes_back(folder, mode, hosts, victim):
    with cutting(hosts, folder) as job:
        job.start("--nnodes", f"1:{hosts}", *MODES[mode], words=(mode,))
        first = job.trains(hosts)
        victim = victim or ("b" if first == "a" else "a")
        at = cut_off(job, victim)
        job.trains(hosts - 1, at + 0.5)
        while time.monotonic() < at + 20:
            time.sleep(0.1)
        mend_at = mended(job, victim)
        assert victim not in job.led_by(at + 0.5), job.report()
        job.trains(hosts, mend_at)
        ended_well(job)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW) for mode in MODES])
def test_a_cut_of_one_second_changes_nothing(folder, mode):
    with cutting(2, folder) as job:
        job.start("--nnodes", "1:2", *MODES[mode], words=(mode,))
        job.trains(2)
        at = cut_off(job, "b")
        while time.monotonic() < at + 1:
            time.sleep(0.05)
        job.trains(2, mended(job, "b"))
        assert len({step.group for step in job.ledger()}) == 1, job.report()
        ended_well(job)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW) for mode in MODES])
def test_the_first_host_vanishes_and_the_other_half_ends_at_its_limit_with_its_name(folder, mode):
    conf = ("--rdzv-conf", "last_call_timeout=60,join_timeout=15")
    with cutting(2, folder) as job:
        for host in job.hosts:
            host.variables["CUT_TIMEOUT_S"] = "15"
        job.start("--nnodes", "1:2", *MODES[mode][:-2], *conf, words=(mode,))
        first = job.trains(2)
        number = "ab".index(first)
        at = cut_off(job, first)
        job.hosts[number].kill()  # none of its last words gets through
        assert job.launchers[1 - number].end(120) != 0, job.report()
        assert f"cut off from {first}" in job.launchers[1 - number].text
        assert job.led_by(at + 0.5) == set(), job.report()
        job.check_nothing_left()


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW) for mode in MODES])
@pytest.mark.parametrize("what", ["loss 20", "delay 0.2"])
def test_a_bad_network_is_slow_and_nobody_is_lost(folder, mode, what):
    with cutting(2, folder) as job, wires(job) as network:
        job.start("--nnodes", "1:2", *MODES[mode], words=(mode,))
        job.trains(2)
        network.tell(*what.split())
        at = time.monotonic()
        job.wait_for(lambda: len([s for s in job.ledger() if s.at > at]) > 10, "10 steps")
        network.tell("clear")
        assert len({step.group for step in job.ledger()}) == 1, job.report()
        ended_well(job)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW) for mode in MODES])
@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_one_direction_cut_is_a_cut(folder, mode, source, target):
    with cutting(2, folder) as job, wires(job) as network:
        job.start("--nnodes", "1:2", *MODES[mode], words=(mode,))
        first = job.trains(2)
        network.tell("drop", source, target)
        at = time.monotonic()
        job.trains(1, at)
        while time.monotonic() < at + 15:
            time.sleep(0.1)
        assert job.led_by(at + 0.5) == {first}, job.report()
        network.tell("clear")
        job.trains(2, time.monotonic())
        ended_well(job)
