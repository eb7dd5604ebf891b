"""The machine of an elastic job in detail: who counts as living, who is let in, and how it ends."""

from __future__ import annotations

import dataclasses

import pytest

from dure.launch.agent.elastic import ElasticMachine
from dure.launch.agent.events import (
    Ended,
    Expired,
    Failed,
    Finished,
    Joined,
    Left,
    Lost,
    Outcome,
    Plan,
    Ready,
    Settings,
    Stop,
    Wait,
    Work,
)
from dure.launch.agent.machine import Phase
from dure.launch.spec import Exit, RankResult


def machine_of(agents: str, nproc: int = 2, **wanted: int) -> ElasticMachine:
    """Return a machine whose round runs on `agents`, unless `wanted` tells of more or fewer."""
    settings = dataclasses.replace(Settings(max_hosts=len(agents)), **wanted)
    machine = ElasticMachine(settings)
    for agent in agents:
        machine.apply(Joined(agent, f"host-{agent}", nproc))
    waits = machine.duty(agents[0])
    if isinstance(waits, Wait) and waits.timer is not None:
        machine.apply(Expired(waits.timer.name))
    machine.apply(Ready(agents[0], 0, "10.0.0.1", 1))
    assert isinstance(machine.duty(agents[0]), Work)
    return machine


def failed(agent: str, local: int, rank: int, times: int = 0) -> Failed:
    worker = RankResult(rank=rank, host=f"host-{agent}", pid=1000 + rank, exit=Exit(code=3))
    return Failed(agent, 0, local, worker, times)


def plan_of(machine: ElasticMachine) -> Plan:
    assert machine.plan is not None
    return machine.plan


def ended(machine: ElasticMachine) -> Outcome:
    """End what runs; return how the job ended."""
    for agent in machine.agents:
        assert isinstance(machine.duty(agent), Stop)
        machine.apply(Ended(agent, 0))
    assert machine.outcome is not None
    return machine.outcome


def test_who_has_ended_well_cannot_fail_any_more() -> None:
    machine = machine_of("a", max_restarts=3)
    machine.apply(Finished("a", 0, 0))
    machine.apply(failed("a", 0, 0))
    assert (machine.failed, machine.restarts, machine.living) == (False, 0, 1)


def test_what_became_of_a_dead_worker_is_told_though_its_host_tells_it_no_more() -> None:
    machine = machine_of("a", nproc=1)
    dead = failed("a", 0, 0)
    machine.apply(dead)
    outcome = ended(machine)
    assert (outcome.code, outcome.ranks, outcome.failure) == (3, (dead.worker,), dead.worker)


def test_replacements_are_counted_by_place_and_only_for_their_host() -> None:
    machine = machine_of("ab", max_restarts=3)
    for local, times in ((1, 0), (0, 0), (1, 1), (1, 1)):  # the last one is told twice
        machine.apply(failed("a", local, local, times))
    first, second = machine.duty("a"), machine.duty("b")
    assert isinstance(first, Work) and first.replaced == ((0, 1), (1, 2))
    assert isinstance(second, Work) and second.replaced == ()
    assert (machine.restarts, machine.living) == (3, 4)
    machine.apply(failed("b", 0, 2))
    assert (machine.restarts, machine.living) == (3, 3)


def test_nobody_is_replaced_while_the_round_is_stopped() -> None:
    machine = machine_of("a", max_restarts=3)
    machine.apply(Left("a", 143))
    machine.apply(failed("a", 0, 0))
    assert (machine.phase, machine.restarts) == (Phase.STOPPING, 0)


@pytest.mark.parametrize(
    ("wanted", "limits"),
    [
        ({}, ""),
        ({"max_restarts": 1}, "restarts: 1 of 1 used"),
        ({"min_ranks": 2}, "fewer than --min-ranks 2 live"),
        (
            {"min_ranks": 2, "max_restarts": 1},
            "fewer than --min-ranks 2 live, restarts: 1 of 1 used",
        ),
    ],
)
def test_each_limit_that_was_reached_is_told(wanted: dict[str, int], limits: str) -> None:
    machine = machine_of("a", **wanted)
    for local, times in ((0, 0), (0, 1), (1, 0), (1, 1)):
        if machine.phase is Phase.RUNNING:
            machine.apply(failed("a", local, local, times))
    assert ended(machine).limit == limits


def test_a_limit_that_was_not_reached_is_not_told() -> None:
    machine = machine_of("ab", nproc=1, min_ranks=2, max_restarts=1, min_hosts=2)
    machine.apply(failed("a", 0, 0))
    machine.apply(Left("b", 143))
    assert "min-ranks" not in ended(machine).limit


def test_a_lost_host_takes_its_workers_with_it_and_is_told_once() -> None:
    machine = machine_of("abc", max_restarts=1)
    machine.apply(Lost("c", "gone"))
    assert (machine.living, machine.restarts, machine.phase) == (4, 0, Phase.RUNNING)
    machine.apply(Lost("c", "gone again"))
    machine.apply(Lost("never-seen", "gone"))
    assert len(machine.notes) == 1
    assert "host-c" in machine.notes[0]


def test_who_comes_is_let_in_while_there_is_room() -> None:
    machine = machine_of("ab")
    machine.apply(Joined("c", "host-c", 1))
    assert plan_of(machine).members == ("a", "b")
    machine.apply(Lost("a"))
    plan = plan_of(machine)
    assert (plan.number, plan.members, plan.nprocs) == (0, ("a", "b", "c"), (2, 2, 1))
    assert plan.hosts == ("host-a", "host-b", "host-c")
    assert (machine.living, isinstance(machine.duty("c"), Work)) == (3, True)
    machine.apply(Joined("d", "host-d", 1))
    assert plan_of(machine) == plan


def test_who_comes_when_a_worker_has_ended_well_is_too_late() -> None:
    machine = machine_of("a", max_hosts=2)
    machine.apply(Finished("a", 0, 0))
    machine.apply(Joined("b", "host-b", 2))
    assert (plan_of(machine).members, machine.duty("b")) == (("a",), Wait())


def test_few_may_be_left_once_a_worker_has_ended_well() -> None:
    machine = machine_of("a", min_ranks=2)
    machine.apply(Finished("a", 0, 0))
    assert (machine.phase, machine.living) == (Phase.RUNNING, 1)
    machine.apply(Finished("a", 0, 1))
    outcome = ended(machine)
    assert (outcome.code, outcome.failure) == (0, None)


def test_who_failed_before_a_worker_ended_well_is_told_too() -> None:
    machine = machine_of("a")
    dead = failed("a", 1, 1)
    machine.apply(dead)
    machine.apply(Finished("a", 0, 0))
    outcome = ended(machine)
    assert (outcome.code, outcome.failure, outcome.ranks) == (0, dead.worker, (dead.worker,))


def test_a_host_that_leaves_with_others_to_go_on_only_takes_its_workers() -> None:
    machine = machine_of("ab", min_hosts=1)
    machine.apply(Left("b", 143))
    assert (machine.phase, machine.living, machine.notes) == (Phase.RUNNING, 2, [])


def test_who_leaves_last_ends_the_job_with_its_code() -> None:
    machine = machine_of("a")
    machine.apply(failed("a", 0, 0))
    machine.apply(Left("a", 143, "told to"))
    outcome = ended(machine)
    assert (outcome.code, outcome.why) == (143, "told to")


def test_a_host_that_leaves_a_job_of_a_fixed_number_ends_it_though_others_live() -> None:
    machine = machine_of("ab", min_hosts=2, max_restarts=1)
    machine.apply(Left("b", 143))
    assert (machine.phase, machine.living) == (Phase.STOPPING, 2)
    machine.apply(failed("a", 0, 0))
    assert machine.restarts == 0, "nobody is replaced any more"
    assert ended(machine).code == 143
