"""The state of an elastic job: who counts as living, who is let in, and how it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dure.launch.agent.elastic import ElasticMachine
from dure.launch.agent.events import Ended, Finished, Joined, Left, Lost, Outcome, Stop, Wait, Work
from dure.launch.agent.machine import Machine, Phase
from dure.launch.spec import Exit
from tests.launch.agent.job_states import apply, end, fail, outcome_of, plan_of, state_of


def elastic(agents: str, nproc: int = 2, **wanted: int) -> Machine:
    return state_of(agents, nproc=nproc, elastic=True, **wanted)


def living(machine: Machine) -> int:
    assert isinstance(machine, ElasticMachine)
    return len(machine._alive)


def ended(machine: Machine) -> Outcome:
    """End what runs; return how the job ended."""
    assert all(isinstance(machine.action(agent), Stop) for agent in machine.agents)
    end(machine)
    return outcome_of(machine)


def test_a_dead_worker_is_replaced_in_its_place_and_the_others_are_left_alone() -> None:
    machine = elastic("ab", max_restarts=3)
    for local, times in ((1, 0), (0, 0), (1, 1), (1, 1)):  # the last one is told twice
        fail(machine, "a", local, times=times)
    first, second = machine.action("a"), machine.action("b")
    assert isinstance(first, Work) and first.replaced == ((0, 1), (1, 2))
    assert isinstance(second, Work) and second.replaced == ()
    assert (machine.restarts, living(machine)) == (3, 4)
    fail(machine, "b")  # no restart is left
    assert (machine.phase, machine.restarts, living(machine)) == (Phase.RUNNING, 3, 3)


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
    machine = elastic("a", **wanted)
    for local, times in ((0, 0), (0, 1), (1, 0), (1, 1)):
        if machine.phase is Phase.RUNNING:
            fail(machine, "a", local, times=times)
    outcome = ended(machine)
    assert (outcome.code, outcome.limit) == (3, limits)


def test_a_lost_host_takes_its_workers_with_it_and_is_told_once() -> None:
    machine = elastic("abc", max_restarts=1)
    apply(machine, Lost("c", "gone"), Lost("c", "gone again"), Lost("never-seen", "gone"))
    assert (living(machine), machine.restarts, machine.phase) == (4, 0, Phase.RUNNING)
    assert machine.notes == ["lost host-c (gone); the others go on"]


def test_notes_are_not_kept_without_end() -> None:
    machine = elastic("a", max_hosts=2)
    for number in range(150):
        apply(machine, Joined(f"b{number}", "host-b", 1), Lost(f"b{number}", f"{number}"))
    assert len(machine.notes) == 30
    assert "149" in machine.notes[-1]


def test_who_comes_gets_numbers_that_nobody_had_while_there_is_room() -> None:
    machine = elastic("ab")
    machine.apply(Joined("c", "host-c", 1))
    assert plan_of(machine).members == ("a", "b")
    machine.apply(Lost("a"))
    plan = plan_of(machine)
    assert (plan.number, plan.members, plan.nprocs) == (0, ("a", "b", "c"), (2, 2, 1))
    assert (living(machine), isinstance(machine.action("c"), Work)) == (3, True)
    machine.apply(Joined("d", "host-d", 1))
    assert plan_of(machine) == plan


def test_once_a_worker_has_ended_well_nobody_comes_is_replaced_or_missed() -> None:
    machine = elastic("a", max_hosts=2, max_restarts=3, min_ranks=2)
    apply(machine, Finished("a", 0, 0), Joined("b", "host-b", 2))
    fail(machine, "a", 0)  # it had ended
    assert (machine.failed, machine.phase, living(machine)) == (False, Phase.RUNNING, 1)
    assert (plan_of(machine).members, machine.action("b")) == (("a",), Wait())
    fail(machine, "a", 1)
    assert (machine.restarts, machine.phase) == (0, Phase.STOPPING)
    end(machine)
    assert outcome_of(machine).code == 0


def test_the_process_that_failed_is_told_not_the_one_in_its_place() -> None:
    machine = elastic("a", max_restarts=1)
    dead = fail(machine, "a", 1).worker
    apply(machine, Finished("a", 0, 0), Finished("a", 0, 1))
    well = replace(dead, pid=8, exit=Exit(code=0))
    machine.apply(Ended("a", 0, (well,)))
    assert machine.outcome == Outcome(code=0, failure=dead, ranks=(well,))


def test_what_became_of_a_dead_worker_is_told_though_its_host_tells_it_no_more() -> None:
    machine = elastic("a", nproc=1)
    dead = fail(machine, "a").worker
    assert ended(machine) == Outcome(code=3, ranks=(dead,), failure=dead)


def test_a_host_that_leaves_with_others_to_go_on_only_takes_its_workers() -> None:
    machine = elastic("ab")
    machine.apply(Left("b", 143))
    assert (machine.phase, living(machine), machine.notes) == (Phase.RUNNING, 2, [])


@pytest.mark.parametrize("agents", ["a", "ab"])
def test_who_leaves_last_or_of_a_fixed_number_ends_the_job_with_its_code(agents: str) -> None:
    machine = elastic(agents, min_hosts=len(agents), min_ranks=1)
    machine.apply(Left(agents[-1], 143, "told to"))
    fail(machine, "a")  # nobody is replaced any more, and no limit was reached
    assert machine.restarts == 0
    outcome = ended(machine)
    assert (outcome.code, outcome.why, outcome.limit) == (143, "told to", "")
