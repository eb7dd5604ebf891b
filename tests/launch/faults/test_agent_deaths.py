"""Jobs on several hosts whose workers, launchers and hosts die: each `dure run` is real.

Launchers that are stopped, and hosts that fail again and again, are in the drill of random kills.
"""

import os
import signal

import pytest

from tests.launch.faults.agents import Crew, Start, alive

FIXED = ("--nnodes", "2", "--nproc", "1", "--max-restarts", "2")
CONF = ("--rdzv-conf", "last_call_timeout=600")
OPEN = ("--nnodes", "1:2", "--nproc", "1", "--max-restarts", "2", *CONF)


def two(crew: Crew, flags: tuple[str, ...], *more: str) -> list[Start]:
    """Start two hosts, the first of which holds the store; the second has `more` flags."""
    crew.start("a", *flags)
    crew.wait_for_store()
    crew.start("b", *flags, *more)
    starts = crew.round(0, 2)
    assert [start.host for start in starts] == ["a", "b"]
    return starts


def test_a_killed_worker_costs_a_round_and_the_program_goes_on_from_its_checkpoint(
    crew: Crew,
) -> None:
    first = two(crew, FIXED)
    step = crew.advance()
    os.kill(first[1].pid, signal.SIGKILL)
    again = crew.round(1, 2)
    assert [start.host for start in again] == ["a", "b"]
    assert again[0].step >= step
    assert {start.pid for start in again}.isdisjoint(start.pid for start in first)
    crew.advance()
    crew.finish()
    assert [host.end() for host in crew.hosts] == [0, 0]


def test_the_first_failure_is_every_hosts_exit_code_and_node_0_tells_it(crew: Crew) -> None:
    two(crew, ("--nnodes", "2", "--nproc", "1"))
    (crew.folder / "fail 1 0").touch()
    assert [host.end() for host in crew.hosts] == [17, 17]
    for host in crew.hosts:
        assert "rank 1 on b" in host.err
    assert "SystemExit: 17" in crew.hosts[0].err


def test_a_killed_launchers_reaper_ends_its_ranks_and_says_so(crew: Crew) -> None:
    first = two(crew, OPEN)
    step = crew.advance()
    crew.hosts[1].process.kill()
    again = crew.round(1, 1)
    assert again[0].host == "a"
    assert again[0].step >= step
    assert not alive(first[1].pid)
    crew.finish()
    assert crew.hosts[0].end() == 0
    assert "lost b (its launcher was killed)" in crew.hosts[0].err


def test_when_the_coordinator_is_killed_all_end_and_a_new_start_goes_on_from_the_checkpoint(
    crew: Crew,
) -> None:
    flags = ("--nnodes", "2", "--nproc", "1", "--max-restarts", "9")
    # So long b looks for a coordinator: at its start, and when that is lost.
    first = two(crew, flags, "--rdzv-conf", "join_timeout=4")
    step = crew.advance()
    crew.hosts[0].process.kill()
    crew.wait_for(lambda: not alive(first[1].pid), "the rank of b to end at its deadline")
    assert crew.hosts[1].end() == 1
    assert "the job's coordinator was lost" in crew.hosts[1].err
    assert "Start the job again on all hosts" in crew.hosts[1].err
    crew.forget_starts()
    crew.start("a", *flags)
    crew.start("b", *flags)
    assert crew.round(0, 2)[0].step >= step
    crew.finish()
    assert [host.end() for host in crew.hosts[2:]] == [0, 0]


@pytest.mark.parametrize(
    ("flags", "which"), [(FIXED, 1), (OPEN, 0)], ids=["one of a fixed number", "the coordinator"]
)
def test_a_host_told_to_end_ends_the_job(crew: Crew, flags: tuple[str, ...], which: int) -> None:
    two(crew, flags)
    crew.hosts[which].process.send_signal(signal.SIGTERM)
    assert [host.end() for host in crew.hosts] == [143, 143]
    if which == 0:
        assert "asked to end on a, which coordinates the job" in crew.hosts[1].err


def test_an_elastic_jobs_dead_worker_is_replaced_and_the_others_are_not_touched(
    crew: Crew,
) -> None:
    flags = ("--nnodes", "2", "--nproc", "1", "--max-restarts", "1", "--elastic")
    first = two(crew, flags)
    os.kill(first[1].pid, signal.SIGKILL)
    crew.wait_for(lambda: len(crew.starts()) == 3, "a replacement")
    new = crew.starts()[-1]
    assert (new.round, new.rank, new.host) == (1, 1, "b")
    assert alive(first[0].pid)
    crew.finish()
    assert [host.end() for host in crew.hosts] == [0, 0]
