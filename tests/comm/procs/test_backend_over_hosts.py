"""Jobs over hosts that are network namespaces: every subject, a cut cable, a dead host.

All jobs run at once, each on a network of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dure.errors import PeerLost
from tests.comm import over_hosts
from tests.comm.forked_ranks import Ranks
from tests.comm.namespace_hosts import Host, hosts, variables_of
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.needs("network namespaces", "engine")


class Jobs:
    """Jobs of two ranks a host, on networks of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.stack = folder, ExitStack()

    def start(self, name: str, fn, *args: object, count: int = 2) -> tuple[Ranks, list[Host]]:
        made = self.stack.enter_context(hosts(count, name))
        folder = self._folder / name
        folder.mkdir()
        inside = [host.inner_pid for host in made for _ in range(2)]
        ranks = Ranks(2 * count, folder, inside=inside)
        self.stack.enter_context(ranks)
        ranks.start(fn, variables_of(made, 2, folder / "key"), *args)
        return ranks, made

    def lose(self, name: str, count: int = 2) -> Ranks:
        """Lose the last host, by the method `name` of it, in the middle of things."""
        goes_on = name == "kill"  # who has lost the store cannot go on
        ranks, made = self.start(f"{name}{count}", over_hosts.lose, goes_on, count=count)
        folder = self._folder / f"{name}{count}"
        until(lambda: len(list(folder.glob("*-ready*"))) == 2 * count, "ranks that reduce")
        getattr(made[-1], name)()
        return ranks


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    made = Jobs(tmp_path_factory.mktemp("jobs"))
    with made.stack:
        yield made


@pytest.fixture(scope="module", autouse=True)
def started(jobs: Jobs) -> dict[str, Ranks]:
    """Start the jobs of all tests; that of the cut cable waits for seconds."""
    checks, _ = jobs.start("checks", over_hosts.run_all)
    return {"cut": jobs.lose("cut"), "kill": jobs.lose("kill"), "checks": checks}


@pytest.fixture(scope="module")
def reports(started: dict[str, Ranks]) -> list[dict[str, str]]:
    return started["checks"].values()


@pytest.mark.parametrize("subject", over_hosts.SUBJECTS)
def test_over_hosts(subject: str, reports: list[dict[str, str]]):
    found = [report.get(subject, "not run: one before it failed") for report in reports]
    assert found == [""] * 4, "\n".join(found)


def _check_death(ranks: Ranks, count: int) -> None:
    lost = 2 * (count - 1)
    for rank in range(lost):
        seen = ranks.result(rank)
        assert isinstance(seen.error, PeerLost) and seen.error.peer == lost
        assert isinstance(seen.again, PeerLost)
        assert seen.elapsed_s < PATIENCE_S / 2
        assert seen.left == lost


def test_dead_host_is_peer_lost_on_all_ranks_of_the_others_which_go_on(started):
    _check_death(started["kill"], 2)


@pytest.mark.slow
def test_dead_host_of_3_is_peer_lost_on_all_ranks_of_the_others(jobs):
    _check_death(jobs.lose("kill", 3), 3)


def test_cut_cable_is_peer_lost_on_both_sides(started):
    for rank in range(4):
        seen = started["cut"].result(rank)
        assert isinstance(seen.error, PeerLost)
        assert seen.error.peer == (2 if rank < 2 else 0)
        assert seen.elapsed_s < PATIENCE_S / 2, "three beats, far below the timeout"
