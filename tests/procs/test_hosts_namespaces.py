"""Jobs over hosts that are network namespaces: every operation, a cut cable, a dead host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from dure.native import available as native_available
from procs.hosts import Host, hosts, start_job, why_not

PROGRAM = Path(__file__).parent / "programs" / "over_hosts.py"

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
    pytest.mark.skipif(not native_available()[0], reason=native_available()[1] or "no engine"),
]


def _reports(folder: Path) -> dict[int, dict]:
    return {int(p.stem): json.loads(p.read_text()) for p in folder.glob("*.json")}


@pytest.fixture(scope="module", autouse=True)
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[dict[int, dict]]]:
    """Cut a cable on a network of its own: its ranks wait for seconds, and other tests run then."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(_lose, tmp_path_factory.mktemp("cut"), 2, "cut")


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_operation_over_hosts_of_2_ranks(count, tmp_path):
    with hosts(count) as made:
        ranks = start_job(made, 2, [PROGRAM, "check", tmp_path], tmp_path / "key")
        ends = [(r.communicate(timeout=100)[1], r.returncode) for r in ranks]
    assert [code for _, code in ends] == [0] * len(ends), ends
    assert {r["backend"] for r in _reports(tmp_path).values()} == {"hybrid"}


def _lose(tmp_path: Path, count: int, how: str) -> dict[int, dict]:
    """Lose the last host in the middle of things; return what the other ranks reported."""
    with hosts(count, how) as made:
        what = "go_on" if how == "kill" else "lose"  # who lost the store cannot go on
        ranks = start_job(made, 2, [PROGRAM, what, tmp_path], tmp_path / "key")
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n", rank.communicate(timeout=100)
        getattr(Host, how)(made[-1])
        survivors = ranks[: 2 * (count - 1)]
        if how == "cut":
            survivors = ranks
        for rank in survivors:
            rank.communicate(timeout=100)
    return _reports(tmp_path)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_dead_host_is_peer_lost_on_all_ranks_of_the_others(count, tmp_path):
    reports = _lose(tmp_path, count, "kill")
    lost = 2 * (count - 1)
    assert sorted(reports) == list(range(lost))
    for report in reports.values():
        assert (report["error"], report["peer"]) == ("PeerLost", lost), report
        assert report["elapsed_s"] < 2, "the kernel says at once that a process is gone"
        assert report["again"] == "PeerLost"
        assert report["again_s"] < 0.9, "nobody asked other hosts again"
        assert report["left"] == lost
        assert report["shrink_s"] < 20, "three seconds after the loss nobody waits for the host"


def test_cut_cable_is_peer_lost_on_both_sides(cut):
    reports = cut.result()
    assert sorted(reports) == [0, 1, 2, 3]
    for rank, report in reports.items():
        assert report["error"] == "PeerLost", report
        assert report["peer"] == (2 if rank < 2 else 0), report
        assert report["elapsed_s"] < 20, "three beats, far below the timeout of 40 s"
