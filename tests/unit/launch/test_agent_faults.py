"""Who takes part in a round, whose fault its end is, and what people are told of it: by hand."""

from __future__ import annotations

import dataclasses

import pytest

from dure.launch.agent.events import (
    Ended,
    Expired,
    Failed,
    Joined,
    Leave,
    Left,
    Lost,
    Outcome,
    Plan,
    Ready,
    Refused,
    Settings,
    Wait,
)
from dure.launch.agent.faults import Faults
from dure.launch.agent.machine import Machine, Phase, assign_nodes
from dure.launch.spec import Crash, Exit, RankResult

PLAN = Plan(
    number=4,
    members=("a", "b"),
    hosts=("host-a", "host-b"),
    machines=("host-a", "host-b"),
    nprocs=(2, 1),
)


def result(rank: int, *, code: int = 3, pid: int = 7, peer: int | None = None) -> RankResult:
    crash = Crash(type="PeerLost", message="gone", traceback="", exit_code=code, peer=peer)
    return RankResult(
        rank=rank,
        host=PLAN.hosts[0 if rank < 2 else 1],
        pid=pid,
        exit=Exit(code=code),
        crash=None if peer is None else crash,
    )


def faults(first: RankResult | None, *others: RankResult, lost: str = "") -> Faults:
    found = Faults(lost=list(lost))
    if first is not None:
        found.fail(first)
        found.reports[first.rank] = first
    found.reports.update((other.rank, other) for other in others)
    return found


@pytest.mark.parametrize(
    ("found", "blamed", "rank"),
    [
        (faults(result(0)), "host-a", 0),
        (faults(result(2), result(0, code=9)), "host-b", 2),
        (faults(result(0, peer=2), result(2)), "host-b", 2),  # it was only the first to notice
        (faults(result(0, peer=2), result(2, code=0)), "host-a", 0),
        (faults(result(0, peer=2)), "host-a", 0),
        (faults(result(0, peer=2), lost="b"), "host-b", 0),
        (faults(result(0, peer=1), lost="b"), "host-a", 0),  # blames a rank of its own host
        (faults(result(0), lost="b"), "host-a", 0),
        (faults(result(0, peer=9), lost="b"), "host-a", 0),  # nobody's rank
        (faults(result(9), lost="b"), "", 9),
        (faults(None, lost="ba"), "host-b", None),
    ],
)
def test_the_blamed(found: Faults, blamed: str, rank: int | None) -> None:
    assert found.blamed_host(PLAN) == blamed
    cause = found.root_cause()
    assert (None if cause is None else cause.rank) == rank


def test_the_first_failure_counts_and_nothing_is_none() -> None:
    found = Faults()
    assert not found
    found.fail(result(1))
    found.fail(result(0))
    assert found
    assert found.first == result(1)
    assert faults(None, lost="a")


def test_reports_are_told_by_rank() -> None:
    found = faults(result(2), result(0), result(1))
    assert [rank.rank for rank in found.ranks()] == [0, 1, 2]


def test_what_is_known_last_of_the_first_to_fail_is_told_unless_it_is_of_another_process() -> None:
    later = dataclasses.replace(result(1), last="all_reduce 5")
    assert faults(result(1), later).root_cause() == later
    assert faults(result(1), dataclasses.replace(later, pid=8)).root_cause() == result(1)


def test_why_a_round_ended() -> None:
    assert faults(None, lost="ba").setback(PLAN) == "lost host-b, host-a"
    assert faults(result(0, peer=2), lost="b").setback(PLAN) == "lost host-b, with rank 2"
    assert faults(result(2)).setback(PLAN) == "rank 2 on host-b failed: exit code 3"
    assert faults(result(1, peer=9)).setback(PLAN) == "rank 1 on host-a raised PeerLost: gone"


def test_how_a_host_was_lost_is_told_where_it_is_known() -> None:
    machine = machine_of("a", "b")
    machine.apply(Lost("b", "its launcher has ended"))
    machine.apply(Ended("a", 0))
    assert machine.outcome is not None
    assert machine.outcome.why.startswith("lost host-b (its launcher has ended); ")


def test_the_outcome_of_a_defeat() -> None:
    assert faults(result(2), result(0)).defeat(PLAN, "limit") == Outcome(
        code=3, failure=result(2), ranks=(result(0), result(2)), limit="limit"
    )
    assert faults(None, result(0), lost="b").defeat(PLAN, "") == Outcome(
        code=1,
        why="lost host-b; no restarts are allowed (--max-restarts), so the job ends",
        ranks=(result(0),),
    )
    assert faults(None, lost="b").defeat(PLAN, "limit").why == "lost host-b"
    assert faults(result(0, code=0)).defeat(PLAN, "").code == 1  # nobody fails with success


def joined(text: str) -> list[Joined]:
    """Read "a b:2": two agents, of which the second has a fixed node rank."""
    names = [word.partition(":")[::2] for word in text.split()]
    return [Joined(name, name, 1, int(rank) if rank else None) for name, rank in names]


@pytest.mark.parametrize(
    ("here", "before", "members"),
    [
        ("a b c", "", "ab"),
        ("a b c", "c", "ca"),
        ("a b c", "cb", "cb"),
        ("a:2 b:0 c:1", "", "bc"),
        ("a:1 b:0", "ab", "ba"),
        ("a:1 b:1 c:0", "", "ca"),
        ("a:1 b:1 c:0", "cb", "cb"),  # who took part before stays
        ("a b:1 c:0", "", "cb"),
        ("a b:1 c:0", "a", "ac"),
        ("a b:0", "", "ba"),
        ("", "", ""),
    ],
)
def test_who_takes_part(here: str, before: str, members: str) -> None:
    assert "".join(assign_nodes(joined(here), before, 2)) == members


def machine_of(*names: str, max_restarts: int = 0) -> Machine:
    """Return a machine with a round that runs on as many hosts as there may be."""
    machine = Machine(
        Settings(min_hosts=len(names), max_hosts=len(names), max_restarts=max_restarts)
    )
    for name in names:
        machine.apply(Joined(name, f"host-{name}", 1))
    assert machine.phase is Phase.RUNNING
    return machine


def fail(machine: Machine, agent: str, *, code: int = 3) -> None:
    """Let a worker fail, and all members end the round."""
    plan = machine.plan
    assert plan is not None
    rank = plan.node_of(agent)
    worker = RankResult(rank=rank, host=f"host-{agent}", pid=7, exit=Exit(code=code))
    machine.apply(Failed(agent, plan.number, 0, worker))
    for member in plan.members:
        machine.apply(Ended(member, plan.number))


def test_who_asks_for_nothing_gets_one_host_and_no_restart() -> None:
    assert Settings() == Settings(
        min_hosts=1,
        max_hosts=1,
        max_restarts=0,
        join_timeout_s=600.0,
        last_call_s=5.0,
        exclude_after=3,
        min_ranks=1,
        endpoint="",
    )


def test_blame_is_counted_of_rounds_running() -> None:
    machine = Machine(Settings(min_hosts=1, max_hosts=2, max_restarts=9, exclude_after=2))
    for name in "ab":
        machine.apply(Joined(name, f"host-{name}", 1))
    for agent in "bab":
        fail(machine, agent)
        assert not machine.excluded
    fail(machine, "b")
    assert machine.excluded == {"host-b"}
    duty = machine.duty("b")
    assert isinstance(duty, Leave)
    assert duty.outcome.code == 1


def test_another_agent_of_the_blamed_host_does_not_make_enough() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=3, max_restarts=9, exclude_after=1))
    for name, host in (("a", "x"), ("b", "y"), ("c", "y")):
        machine.apply(Joined(name, host, 1))
    fail(machine, "b")
    assert not machine.excluded
    machine.apply(Joined("d", "z", 1))
    machine.apply(Lost("d"))
    assert not machine.excluded


def test_what_a_machine_says_of_itself() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=3))
    assert machine.missing == 2
    machine.apply(Joined("a", "host-a", 1))
    assert (machine.missing, machine.host("a")) == (1, "host-a")
    assert machine.host("b") == "b"
    machine.apply(Joined("b", "host-b", 1))
    machine.apply(Joined("c", "host-c", 1))
    assert (machine.failed, machine.departing, machine._dismissed is not None) == (
        False,
        False,
        False,
    )
    machine.apply(Left("c", 143))
    assert (machine.failed, machine.departing, machine._dismissed is not None) == (
        False,
        True,
        False,
    )
    machine.apply(Failed("a", 0, 0, result(0)))
    assert machine.failed
    assert machine.agents == ("a", "b", "c")
    machine.apply(Lost("a"))
    assert machine.agents == ("b", "c")


def test_a_host_that_leaves_a_fixed_number_dismisses_all_and_later_failures_are_its_doing() -> None:
    machine = machine_of("a", "b", max_restarts=3)
    machine.apply(Left("b", 130, "Ctrl-C"))
    assert (machine.departing, machine._dismissed is not None) == (True, True)
    machine.apply(Left("a", 143))  # the first counts
    fail(machine, "a")
    assert machine.outcome is not None
    assert (machine.outcome.code, machine.outcome.why) == (130, "Ctrl-C")
    assert not machine.failed


def test_a_failure_before_the_dismissal_is_the_outcome_and_nothing_is_restarted() -> None:
    machine = machine_of("a", "b", max_restarts=3)
    machine.apply(Failed("a", 0, 0, result(0, code=9)))
    machine.apply(Left("b", 143))
    machine.apply(Ended("a", 0))
    machine.apply(Ended("b", 0))
    assert machine.outcome is not None
    assert (machine.outcome.code, machine.restarts) == (9, 0)


def test_the_last_host_that_leaves_ends_the_job_also_while_it_waits() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=3))
    machine.apply(Joined("a", "host-a", 1))
    machine.apply(Joined("b", "host-b", 1))
    machine.apply(Left("a", 143))
    assert machine.phase is Phase.GATHERING
    assert machine.agents == ("b",)
    machine.apply(Left("b", 130, "told"))
    assert machine.outcome == Outcome(code=130, why="told")


def test_timers_of_another_gathering_mean_nothing() -> None:
    machine = machine_of("a", "b", max_restarts=3)
    for agent in "ab":
        machine.apply(Failed(agent, 0, 0, result(0)))
    machine.apply(Lost("b"))
    machine.apply(Ended("a", 0))
    assert machine.duty("a") == Wait(machine._timer())
    timer = machine._timer()
    for name in ("join 0", "last call 0", "last call 1", "join 2"):
        machine.apply(Expired(name))
        assert machine.phase is Phase.GATHERING
    assert (timer.name, timer.after_s) == ("join 1", 600.0)
    machine.apply(Expired(timer.name))
    assert machine.outcome is not None
    assert machine.outcome.code == 3
    assert machine.outcome.failure == result(0)
    assert machine.outcome.ranks == (result(0),)
    assert "1 of 2 (host-a)" in machine.outcome.why
    assert "--nnodes" in machine.outcome.why


def test_of_several_clocks_that_run_out_the_first_counts() -> None:
    machine = Machine(Settings(min_hosts=1, max_hosts=2))
    machine.apply(Joined("a", "host-a", 2))
    timer = machine._timer()
    for _ in range(2):  # another agent's clock is late
        machine.apply(Expired(timer.name))
    assert machine.plan is not None
    assert (machine.phase, machine.plan.number) == (Phase.RUNNING, 0)


def test_before_the_first_round_nothing_is_told_of_one() -> None:
    machine = Machine(Settings(min_hosts=1, max_hosts=2))
    machine.apply(Joined("a", "host-a", 2))
    machine.apply(Failed("a", 0, 0, result(0)))
    assert not machine.failed


def test_a_spare_that_leaves_a_fixed_number_dismisses_nobody() -> None:
    machine = machine_of("a", "b")
    machine.apply(Joined("c", "host-c", 1))
    machine.apply(Left("c", 143))
    assert (machine.phase, machine._dismissed is not None) == (Phase.RUNNING, False)


def test_who_would_have_been_enough_but_for_a_taken_node_rank_is_told_so() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=2, endpoint="node1:29400"))
    for name in "ab":
        machine.apply(Joined(name, name, 1, 0))
    machine.apply(Expired("join 0"))
    assert machine.outcome is not None
    assert "node rank that was taken" in machine.outcome.why
    assert "node1:29400" in machine.outcome.why


def test_nobody_came() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=2))
    machine.apply(Expired("join 0"))
    assert machine.outcome is not None
    assert machine.outcome.code == 1
    assert "(none)" in machine.outcome.why
    assert "the endpoint" in machine.outcome.why


def test_the_last_call_starts_the_first_round_and_takes_its_time() -> None:
    machine = Machine(Settings(min_hosts=1, max_hosts=2, last_call_s=8.0))
    machine.apply(Joined("a", "host-a", 1))
    timer = machine._timer()
    assert (timer.name, timer.after_s) == ("last call 0", 8.0)
    machine.apply(Expired("join 0"))
    assert machine.plan is None
    machine.apply(Expired(timer.name))
    assert machine.phase is Phase.RUNNING


def test_the_limit_is_told_where_there_is_one() -> None:
    for most, limit in ((0, ""), (1, "restarts: 1 of 1 used")):
        machine = machine_of("a", max_restarts=most)
        for _ in range(most + 1):
            fail(machine, "a")
        assert machine.outcome is not None
        assert machine.outcome.limit == limit
    assert machine.setback == "rank 0 on host-a failed: exit code 3"


def test_a_member_that_was_lost_after_it_had_succeeded_costs_nothing() -> None:
    machine = machine_of("a", "b")
    machine.apply(Ended("b", 0, well=True))
    machine.apply(Lost("b"))
    assert machine.phase is Phase.RUNNING
    machine.apply(Ended("a", 0, well=True))
    assert machine.outcome == Outcome(code=0)


def test_a_host_that_comes_when_some_have_succeeded_is_too_late() -> None:
    machine = Machine(Settings(min_hosts=1, max_hosts=3))
    for name in "ab":
        machine.apply(Joined(name, name, 1))
    machine.apply(Expired("last call 0"))
    machine.apply(Ended("a", 0, well=True))
    machine.apply(Joined("c", "c", 1))
    assert machine.phase is Phase.RUNNING


def test_hosts_that_come_or_leave_are_why_the_next_round_begins() -> None:
    machine = Machine(Settings(min_hosts=1, max_hosts=2))
    machine.apply(Joined("a", "a", 1))
    machine.apply(Expired("last call 0"))
    machine.apply(Joined("b", "b", 1))
    machine.apply(Ended("a", 0))
    assert (machine.setback, machine.restarts) == ("hosts came or left", 0)
    assert machine.plan is not None
    assert (machine.plan.number, machine.plan.members) == (1, ("a", "b"))


def test_who_was_lost_while_it_was_leaving_costs_no_restart() -> None:
    machine = Machine(Settings(min_hosts=1, max_hosts=2))
    for name in "ab":
        machine.apply(Joined(name, name, 1))
    machine.apply(Left("b", 143))
    machine.apply(Lost("b"))
    machine.apply(Ended("a", 0))
    assert (machine.phase, machine.restarts) == (Phase.RUNNING, 0)
    machine.apply(Ready("b", 0, "late", 1))
    machine.apply(Failed("a", 0, 0, result(0)))  # of the round before
    assert machine.phase is Phase.RUNNING
    assert not machine.failed


def test_notes_are_kept_once_and_not_without_end() -> None:
    machine = Machine(Settings())
    for number in range(150):
        machine.apply(Refused("h", str(number)))
        machine.apply(Refused("h", str(number)))
    assert len(machine.notes) == len(set(machine.notes)) == 30
    assert machine.notes[-1].endswith("149")


def test_reports_of_the_end_take_the_place_of_the_first_ones() -> None:
    machine = machine_of("a", "b")
    for code in (3, 4):
        machine.apply(Failed("a", 0, 0, result(0, code=code)))
    machine.apply(Ended("b", 0, (result(1, code=5),)))
    assert machine.phase is Phase.STOPPING
    machine.apply(Ended("a", 0, well=True))  # all its workers had ended before it was told to stop
    assert machine.outcome is not None
    assert machine.outcome.ranks == (result(0, code=3), result(1, code=5))
