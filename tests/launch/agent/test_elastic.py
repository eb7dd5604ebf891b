"""The state of an elastic job: who counts as living, who is let in, and how it ends."""

from dataclasses import replace

import pytest

from dure.launch.agent.elastic import ElasticState
from dure.launch.agent.events import (
    Ended,
    Finished,
    Idle,
    JobOutcome,
    Joined,
    Left,
    Lost,
    Replacement,
    RunRound,
    Stop,
)
from dure.launch.agent.state import JobPhase, JobState
from dure.launch.spec import Exit
from tests.launch.agent.job_states import apply, end, fail, outcome_of, plan_of, state_of


def elastic(agents: str, nproc: int = 2, **wanted: int) -> JobState:
    return state_of(agents, nproc=nproc, elastic=True, **wanted)


def living(state: JobState) -> int:
    assert isinstance(state, ElasticState)
    return len(state._alive)


def notes(state: JobState) -> tuple[tuple[str, str], ...]:
    action = state.action("a")
    assert isinstance(action, RunRound)
    return action.notes


def ended(state: JobState) -> JobOutcome:
    """End what runs; return how the job ended."""
    assert all(isinstance(state.action(agent), Stop) for agent in state.agents)
    end(state)
    return outcome_of(state)


def test_a_dead_worker_is_replaced_in_its_place_and_the_others_are_left_alone() -> None:
    state = elastic("ab", max_restarts=3)
    for local, times in ((1, 0), (0, 0), (1, 1), (1, 1)):  # the last one is told twice
        fail(state, "a", local, times=times)
    first, second = state.action("a"), state.action("b")
    assert isinstance(first, RunRound) and first.replaced == (
        Replacement(0, 1, 2),
        Replacement(1, 2, 3),
    )
    assert isinstance(second, RunRound) and second.replaced == ()
    assert (state.restarts, living(state)) == (3, 4)
    fail(state, "b")  # no restart is left
    assert (state.phase, state.restarts, living(state)) == (JobPhase.RUNNING, 3, 3)


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
    state = elastic("a", **wanted)
    for local, times in ((0, 0), (0, 1), (1, 0), (1, 1)):
        if state.phase is JobPhase.RUNNING:
            fail(state, "a", local, times=times)
    outcome = ended(state)
    assert (outcome.code, outcome.limit) == (3, limits)


def test_a_lost_host_takes_its_workers_with_it_and_is_told_once() -> None:
    state = elastic("abc", max_restarts=1)
    apply(state, Lost("c", "gone"), Lost("c", "gone again"), Lost("never-seen", "gone"))
    assert (living(state), state.restarts, state.phase) == (4, 0, JobPhase.RUNNING)
    assert notes(state) == (("c", "lost host-c (gone); the others continue"),)
    for number in range(50):
        apply(state, Joined(f"d{number}", "host-d", 1), Lost(f"d{number}"))
    assert len(notes(state)) == 8  # the last ones


def test_who_comes_gets_numbers_that_nobody_had_while_there_is_room() -> None:
    state = elastic("ab")
    state.apply(Joined("c", "host-c", 1))
    assert plan_of(state).members == ("a", "b")
    state.apply(Lost("a"))
    plan = plan_of(state)
    assert (plan.number, plan.members) == (0, ("a", "b", "c"))
    action = state.action("c")
    assert isinstance(action, RunRound)
    part = action.round
    assert (part.node, part.first_rank, part.world_size, living(state)) == (2, 4, 5, 3)
    state.apply(Joined("d", "host-d", 1))
    assert plan_of(state) == plan


def test_once_a_worker_has_ended_well_nobody_comes_is_replaced_or_missed() -> None:
    state = elastic("a", max_hosts=2, max_restarts=3, min_ranks=2)
    apply(state, Finished("a", 0, 0), Joined("b", "host-b", 2))
    fail(state, "a", 0)  # it had ended
    assert (state.failed, state.phase, living(state)) == (False, JobPhase.RUNNING, 1)
    assert plan_of(state).members == ("a",)
    assert isinstance(state.action("b"), Idle)
    fail(state, "a", 1)
    assert (state.restarts, state.phase) == (0, JobPhase.STOPPING)
    end(state)
    assert outcome_of(state).code == 0


def test_the_process_that_failed_is_told_not_the_one_in_its_place() -> None:
    state = elastic("a", max_restarts=1)
    dead = fail(state, "a", 1).worker
    apply(state, Finished("a", 0, 0), Finished("a", 0, 1))
    well = replace(dead, pid=8, exit=Exit(code=0))
    state.apply(Ended("a", 0, (well,)))
    assert state.outcome == JobOutcome(code=0, failure=dead, ranks=(well,))


def test_a_host_that_leaves_with_others_to_go_on_only_takes_its_workers() -> None:
    state = elastic("ab")
    state.apply(Left("b", 143))
    assert (state.phase, living(state), notes(state)) == (JobPhase.RUNNING, 2, ())


@pytest.mark.parametrize("agents", ["a", "ab"])
def test_who_leaves_last_or_of_a_fixed_number_ends_the_job_with_its_code(agents: str) -> None:
    state = elastic(agents, min_hosts=len(agents), min_ranks=1)
    state.apply(Left(agents[-1], 143, "told to"))
    fail(state, "a")  # nobody is replaced any more, and no limit was reached
    assert state.restarts == 0
    outcome = ended(state)
    assert (outcome.code, outcome.why, outcome.limit) == (143, "told to", "")
