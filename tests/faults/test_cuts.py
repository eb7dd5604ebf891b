"""Networks that are really cut, between hosts that are network namespaces.

No test says how fast something is, but for the limits that docs/restarts.md, docs/elastic.md and
docs/hosts.md state, with room for a loaded machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
ELASTIC = ("--nproc", "1", "--elastic", "--max-restarts", "3", *CONF)
SLOW = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def trained(job: Cutting, size: int) -> None:
    """Wait until all ranks train together, and the first host leads them."""
    job.trains("a", size)


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

    codes: list[int]
    after_s: list[float]
    texts: list[str]
    errors: list[tuple[str, str]]


def _plain(folder: Path) -> Ends:
    """Cut host b off in the middle of a plain job's all_reduces."""
    with cutting(2, folder, "plain") as job:
        job.start("--nnodes", "2", "--nproc", "1", words=("rounds",))
        trained(job, 2)
        at = cut_off(job, "b")
        codes = [launcher.end(90) for launcher in job.launchers]
        job.check_nothing_left()
        said = [(host, what) for _, host, _, what in job.said() if not what.startswith("up")]
        after_s = [launcher.ended_at - at for launcher in job.launchers]
        return Ends(codes, after_s, [launcher.text for launcher in job.launchers], said)


def _elastic(folder: Path) -> tuple[list[str], str]:
    """Cut host b off an elastic job, until one part goes on and the other knows that it must not.

    Returns:
        Who wrote into the ledger afterwards, and what b's launcher said.
    """
    with cutting(2, folder, "elastic") as job:
        job.start("--nnodes", "2", *ELASTIC, words=("elastic",))
        trained(job, 2)
        at = cut_off(job, "b")
        job.trains("a", 1, at)
        b = job.launchers[1]
        job.wait_for(lambda: "and waits for the other" in b.text, "b to wait")
        job.check_one_at_a_time()
        return [step.host for step in job.ledger() if step.at > at], b.text


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Future[Ends], Future]]:
    """Start both short ones: they mostly wait, and each has a network of its own."""
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(_plain, tmp_path_factory.mktemp("plain"))
        yield plain, pool.submit(_elastic, tmp_path_factory.mktemp("elastic"))


def test_a_plain_job_ends_on_both_sides_and_each_names_the_other(short):
    ends = short[0].result()
    assert 0 not in ends.codes, ends
    assert max(ends.after_s) < 25, "3 s for the ranks, 5 s and 2 s for the launchers, when quiet"
    assert sorted(ends.errors) == [("a", "PeerLost 1"), ("b", "PeerLost 0")], ends
    assert "lost b" in ends.texts[0]
    assert "lost a" in ends.texts[1]


def test_of_an_elastic_job_in_two_halves_the_one_with_the_first_rank_goes_on(short):
    hosts, b = short[1].result()
    assert set(hosts) == {"a"}
    assert "lost a" in b


# ---- drills: restart rounds --------------------------------------------------------------------

MODES = {"rounds": ROUNDS, "elastic": ELASTIC}


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW) for mode in MODES])
@pytest.mark.parametrize(
    ("hosts", "victims", "leader"),
    [
        pytest.param(2, "b", "a", id="half without the first rank"),
        pytest.param(3, "c", "a", id="one of three"),
        pytest.param(3, "a", "b", id="the store's host of three"),
    ],
)
def test_a_host_cut_off_for_20_s_waits_and_comes_back(folder, mode, hosts, victims, leader):
    with cutting(hosts, folder) as job:
        job.start("--nnodes", f"1:{hosts}", *MODES[mode], words=(mode,))
        trained(job, hosts)
        at = cut_off(job, victims)
        job.trains(leader, hosts - 1, at)
        while time.monotonic() < at + 20:
            time.sleep(0.1)
        mend_at = mended(job, victims)
        assert {step.host for step in job.ledger() if step.at > at + 1} == {leader}, job.report()
        job.trains(leader, hosts, mend_at)
        ended_well(job)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW) for mode in MODES])
def test_a_cut_of_one_second_changes_nothing(folder, mode):
    with cutting(2, folder) as job:
        job.start("--nnodes", "1:2", *MODES[mode], words=(mode,))
        trained(job, 2)
        at = cut_off(job, "b")
        while time.monotonic() < at + 1:
            time.sleep(0.05)
        at = mended(job, "b")
        job.trains("a", 2, at)
        assert len({step.group for step in job.ledger()}) == 1, job.report()
        ended_well(job)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW) for mode in MODES])
def test_the_first_host_vanishes_and_the_other_half_ends_at_its_limit_with_its_name(folder, mode):
    conf = ("--rdzv-conf", "last_call_timeout=60,join_timeout=15")
    with cutting(2, folder) as job:
        job.hosts[1].variables["CUT_TIMEOUT_S"] = "15"
        job.start("--nnodes", "1:2", *MODES[mode][:-2], *conf, words=(mode,))
        trained(job, 2)
        at = cut_off(job, "a")
        job.hosts[0].kill()  # none of its last words gets through
        assert job.launchers[1].end(80) != 0, job.report()
        assert "cut off from a" in job.launchers[1].text
        assert [step for step in job.ledger() if step.at > at + 1] == [], job.report()
        job.check_nothing_left()


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW) for mode in MODES])
def test_without_the_quorum_rule_any_part_goes_on(folder, mode):
    conf = ("--rdzv-conf", "last_call_timeout=60,quorum=0")
    with cutting(2, folder) as job:
        job.start("--nnodes", "1:2", *MODES[mode][:-2], *conf, words=(mode,))
        trained(job, 2)
        at = cut_off(job, "a")
        job.trains("a", 1, at)
        job.trains("b", 1, at)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW) for mode in MODES])
@pytest.mark.parametrize("what", ["loss 20", "delay 0.2"])
def test_a_bad_network_is_slow_and_nobody_is_lost(folder, mode, what):
    with cutting(2, folder) as job, wires(job) as network:
        job.start("--nnodes", "1:2", *MODES[mode], words=(mode,))
        trained(job, 2)
        network.tell(*what.split())
        at = time.monotonic()
        job.wait_for(lambda: len([s for s in job.ledger() if s.at > at]) > 20, "20 steps", 120)
        network.tell("clear")
        assert len({step.group for step in job.ledger()}) == 1, job.report()
        ended_well(job)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW) for mode in MODES])
@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_one_direction_cut_is_a_cut(folder, mode, source, target):
    with cutting(2, folder) as job, wires(job) as network:
        job.start("--nnodes", "1:2", *MODES[mode], words=(mode,))
        trained(job, 2)
        network.tell("drop", source, target)
        at = time.monotonic()
        job.trains("a", 1, at)
        while time.monotonic() < at + 15:
            time.sleep(0.1)
        assert {step.host for step in job.ledger() if step.at > at + 1} == {"a"}, job.report()
        network.tell("clear")
        job.trains("a", 2, time.monotonic())
        ended_well(job)
