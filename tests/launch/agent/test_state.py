"""When rounds begin and end, and who takes part."""

from dataclasses import replace

import msgspec
import pytest

from dure.launch.agent.events import (
    Ended,
    Expired,
    Failed,
    Idle,
    JobOutcome,
    Joined,
    Left,
    Lost,
    Rejoin,
    RunRound,
    Settings,
)
from dure.launch.agent.state import JobPhase, JobState, assign_nodes
from dure.launch.spec import Crash
from tests.launch.agent.job_states import (
    apply,
    end,
    fail,
    joined,
    outcome_of,
    plan_of,
    ready,
    result,
    state_of,
)

# --- who takes part ------------------------------------------------------------------------------


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
        ("a b:1 c:0", "", "ab"),
        ("a b:1 c:0", "c", "ca"),
        ("", "", ""),
    ],
)
def test_who_takes_part(here: str, before: str, members: str) -> None:
    """`here` names agents as they came, some with a fixed node rank."""
    names = [word.partition(":")[::2] for word in here.split()]
    willing = [joined(name, 1, int(rank) if rank else None) for name, rank in names]
    assert "".join(each.agent for each in assign_nodes(willing, before, 2)) == members


# --- how rounds follow each other ----------------------------------------------------------------


def test_a_failure_within_the_limit_starts_the_next_round_in_the_same_order() -> None:
    state = state_of("ab", nproc=2, max_restarts=1)
    fail(state, "b", 1)
    end(state)
    again = ready(state)
    assert (again.number, again.members, state.restarts) == (1, ("a", "b"), 1)
    assert state.setback == "rank 3 on host-b failed: exit code 3"
    fail(state, "a", code=7)
    fail(state, "b")
    end(state)
    outcome = outcome_of(state)
    assert (outcome.code, outcome.limit) == (7, "restarts: 1 of 1 used")
    assert outcome.failure == result(0, code=7)


def test_a_lost_host_costs_a_restart_and_a_host_that_comes_none() -> None:
    state = state_of("abc", min_hosts=2, max_hosts=4, max_restarts=1)
    state.apply(Lost("a", "its launcher was killed"))
    assert isinstance(state.action("a"), Rejoin)
    end(state)
    assert state.setback == "lost host-a (its launcher was killed)"
    assert (plan_of(state).members, state.restarts) == (("b", "c"), 1)
    state.apply(joined("d"))
    assert state.phase is JobPhase.STOPPING  # for d came, and there is room
    end(state)
    assert ready(state).members == ("b", "c", "d")
    assert (state.restarts, state.setback) == (1, "hosts came or left")


def test_a_member_that_was_lost_after_it_had_succeeded_costs_nothing() -> None:
    state = state_of("ab")
    apply(state, Ended("b", 0, well=True), Lost("b"))
    assert state.phase is JobPhase.RUNNING
    state.apply(Ended("a", 0, well=True))
    assert state.outcome == JobOutcome(code=0)


def test_a_host_that_comes_when_some_have_succeeded_is_too_late() -> None:
    state = state_of("ab", max_hosts=3)
    apply(state, Ended("a", 0, well=True), joined("c"))
    assert state.phase is JobPhase.RUNNING


def test_a_host_that_waits_after_a_loss_names_the_lost_host() -> None:
    state = state_of("ab", max_restarts=1, endpoint="a:1")
    apply(state, Lost("b", "its launcher was killed"), Ended("a", 0))
    waiting = state.action("a")
    lost = "lost host-b (its launcher was killed)"
    assert waiting.line == f"{lost}; waiting at a:1 until 2 hosts have joined (at most 600 s)"


# --- hosts that have no part ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("came", "why"),
    [
        (Joined("c", "host-c", 1), "the job runs on 2 hosts; this host waits as a spare"),
        (Joined("c", "host-a", 1), "another launcher of this host takes part in the job at a:1; "),
    ],
)
def test_a_spare_or_duplicate_host_learns_why_it_waits(came: Joined, why: str) -> None:
    state = JobState(Settings(min_hosts=2, max_hosts=2, endpoint="a:1"))
    apply(state, joined("a", 1, 0), joined("b", 1, 1))
    ready(state)
    state.apply(came)
    action = state.action("c")
    assert action.line.startswith(why)
    for member in "ab":
        assert isinstance(state.action(member), RunRound)


def test_a_host_that_is_let_in_is_not_told_that_it_is_a_spare() -> None:
    state = state_of("ab", min_hosts=1, max_hosts=3)
    state.apply(joined("c"))
    assert (state.phase, state.action("c")) == (JobPhase.STOPPING, Idle())
    end(state)
    assert ready(state).members == ("a", "b", "c")


# --- hosts that leave ----------------------------------------------------------------------------


@pytest.mark.parametrize("failed", [False, True])
def test_a_host_that_leaves_ends_a_job_of_a_fixed_number(failed: bool) -> None:
    state = state_of("ab", max_restarts=3)
    if failed:  # before: then that is the outcome, and nothing is restarted
        fail(state, "a", code=9)
    apply(state, Left("b", 130, "Ctrl-C"), Left("a", 143))  # the first counts
    assert state.departing
    fail(state, "a")  # because it was told to end
    end(state)
    outcome = outcome_of(state)
    assert (outcome.code, outcome.why) == ((9, "") if failed else (130, "Ctrl-C"))
    assert state.restarts == 0


@pytest.mark.parametrize("lost", [False, True])
def test_a_host_that_leaves_is_waited_for_and_costs_no_restart(lost: bool) -> None:
    state = state_of("ab", min_hosts=1)
    apply(state, Left("b", 143), Ended("a", 0))
    assert state.phase is JobPhase.STOPPING  # b's workers are still there
    state.apply(Lost("b") if lost else Ended("b", 0))
    assert (ready(state).members, state.agents, state.departing) == (("a",), ("a",), False)
    state.apply(Failed("a", 0, 0, result(0)))  # of the round before
    assert (state.phase, state.restarts, state.failed) == (JobPhase.RUNNING, 0, False)


def test_a_spare_takes_the_place_of_a_host_that_leaves() -> None:
    state = apply(state_of("ab"), joined("c"), Left("b", 143))
    assert state.departing
    end(state)
    assert (ready(state).members, state.restarts) == (("a", "c"), 0)


@pytest.mark.parametrize(
    ("event", "code"), [(Left("a", 143, "told", ends_job=True), 143), (Left("c", 143), None)]
)
def test_who_coordinates_ends_the_job_and_a_spare_does_not(event: Left, code: int | None) -> None:
    state = apply(state_of("ab"), joined("c"), event)
    end(state)
    assert (state.outcome and state.outcome.code) == code


def test_before_the_first_round_a_host_may_leave_and_come_again() -> None:
    state = apply(JobState(Settings(min_hosts=2, max_hosts=2)), joined("a"), Left("a", 130))
    assert (state.phase, state.action("a")) == (JobPhase.GATHERING, Rejoin())
    assert plan_of(apply(state, joined("b"), joined("c"))).members == ("b", "c")


# --- waiting -------------------------------------------------------------------------------------


def test_timers_of_another_gathering_mean_nothing() -> None:
    state = state_of("ab", max_restarts=3)
    fail(state, "a")
    apply(state, Lost("b"), Ended("a", 0))
    for name in ("join 0", "last call 0", "last call 1", "join 2"):
        state.apply(Expired(name))
        assert state.phase is JobPhase.GATHERING
    assert timer(state) == ("join 1", 600.0)
    state.apply(Expired("join 1"))
    outcome = outcome_of(state)
    assert (outcome.code, outcome.failure, outcome.ranks) == (3, result(0), (result(0),))


def timer(state: JobState) -> tuple[str, float]:
    """Return for what agents wait, and how long."""
    action = state.action(state.agents[0])
    assert isinstance(action, Idle)
    return action.timer, action.after_s


def test_the_last_call_starts_the_first_round_and_takes_its_time() -> None:
    state = JobState(Settings(min_hosts=1, max_hosts=2, last_call_s=8.0))
    state.apply(joined("a"))
    assert timer(state) == ("last call 0", 8.0)
    apply(state, Expired("join 0"), Failed("a", 0, 0, result(0)))
    assert (state.plan, state.failed) == (None, False)
    state.apply(Expired("last call 0"))
    assert (state.phase, plan_of(state).number) == (JobPhase.RUNNING, 0)


def test_rounds_that_fail_early_are_followed_by_longer_and_longer_pauses() -> None:
    state = state_of("ab", max_restarts=9, restart_delay_s=3)
    for number, delay_s in enumerate([0, 1, 2, 3, 3]):
        fail(state, "b", early=True)
        end(state)
        if delay_s:
            assert timer(state) == (f"restart {number + 1}", delay_s)
            wait = state.action("a")
            assert wait.line.endswith(f"exit code 3; the next round starts in {delay_s} s")
            state.apply(Expired(f"restart {number + 1}"))
        assert ready(state).number == number + 1
        work = state.action("a")
        assert (work.delay_s, work.restarts) == (delay_s, number + 1)
    fail(state, "a")  # after some work
    end(state)
    assert ready(state).number == 6


@pytest.mark.parametrize(
    ("came", "endpoint", "why"),
    [
        ([], "", ["too few hosts came to the endpoint", "(none)"]),
        ([joined("a")], "n:1", ["too few hosts came to n:1", "1 of 2 (host-a)", "--nnodes"]),
        ([joined("a", 1, 0), joined("b", 1, 0)], "n:1", ["node rank that was already in use"]),
        ([joined("a")], "localhost:1", ["each host reaches only itself at localhost"]),
        ([joined("a")], "127.0.0.1:1", ["each host reaches only itself at 127.0.0.1"]),
        ([joined("a")], "[::1]:1", ["each host reaches only itself at ::1"]),
    ],
)
def test_too_few_came(came: list[Joined], endpoint: str, why: list[str]) -> None:
    state = JobState(Settings(min_hosts=2, max_hosts=2, join_timeout_s=7, endpoint=endpoint))
    apply(state, *came)
    if came:
        waiting = state.action("a")
        assert ("itself" in waiting.line) == ("itself" in why[0])
    state.apply(Expired("join 0"))
    assert outcome_of(state).code == 1
    assert [word for word in why if word not in outcome_of(state).why] == []


def test_the_state_stays_small_though_many_ranks_say_much() -> None:
    state = state_of("ab", nproc=500)
    crash = Crash(type="E", message="m" * 8000, traceback="t" * 8000, peer=None)
    ranks = tuple(replace(result(rank), crash=crash) for rank in range(1000))
    state.apply(Failed("a", 0, 0, ranks[0]))
    apply(state, Ended("a", 0, ranks[:500]), Ended("b", 0, ranks[500:]))
    failure = outcome_of(state).failure
    assert failure.crash == crash
    assert len(outcome_of(state).ranks) == 1000
    assert len(msgspec.msgpack.encode(state)) < 1 << 19
