"""When rounds begin and end, and who takes part: by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.launch.agent.elastic import ElasticState
from dure.launch.agent.events import (
    Ended,
    Event,
    Expired,
    Failed,
    Finished,
    Joined,
    Leave,
    Left,
    Lost,
    Missing,
    Outcome,
    Prepare,
    Ready,
    Refused,
    Rejoin,
    Settings,
    Stop,
    Wait,
    Work,
)
from dure.launch.agent.state import JobState, Phase, assign_nodes
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
        ("a b:1 c:0", "", "cb"),
        ("a b:1 c:0", "a", "ac"),
        ("a b:0", "", "ba"),
        ("", "", ""),
    ],
)
def test_who_takes_part(here: str, before: str, members: str) -> None:
    """`here` names agents as they came, some with a fixed node rank."""
    names = [word.partition(":")[::2] for word in here.split()]
    willing = [joined(name, 1, int(rank) if rank else None) for name, rank in names]
    assert "".join(each.agent for each in assign_nodes(willing, before, 2)) == members


# --- how rounds follow each other ----------------------------------------------------------------


def test_all_members_succeed_the_job_ends_well() -> None:
    state = state_of("ab")
    state.apply(Ended("a", 0, well=True))
    assert state.action("a") == Wait()
    state.apply(Ended("b", 0, well=True))
    assert state.outcome == Outcome(code=0)
    assert state.action("a") == state.action("?") == Leave(Outcome(code=0))


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


def test_reports_of_the_end_take_the_place_of_the_first_ones() -> None:
    state = state_of("ab")
    for code in (3, 4):
        fail(state, "a", code=code)
    state.apply(Ended("b", 0, (result(1, code=5),)))
    assert state.phase is Phase.STOPPING
    state.apply(Ended("a", 0, well=True))  # all its workers had ended before it was told to stop
    assert outcome_of(state).ranks == (result(0, code=3), result(1, code=5))


def test_a_lost_host_costs_a_restart_and_a_host_that_comes_none() -> None:
    state = state_of("abc", min_hosts=2, max_hosts=4, max_restarts=1)
    state.apply(Lost("a", "its launcher was killed"))
    assert isinstance(state.action("a"), Rejoin)
    end(state)
    assert state.setback == "lost host-a (its launcher was killed)"
    assert (plan_of(state).members, state.restarts) == (("b", "c"), 1)
    state.apply(joined("d"))
    assert state.phase is Phase.STOPPING  # for d came, and there is room
    end(state)
    assert ready(state).members == ("b", "c", "d")
    assert (state.restarts, state.setback) == (1, "hosts came or left")


def test_a_member_that_was_lost_after_it_had_succeeded_costs_nothing() -> None:
    state = state_of("ab")
    apply(state, Ended("b", 0, well=True), Lost("b"))
    assert state.phase is Phase.RUNNING
    state.apply(Ended("a", 0, well=True))
    assert state.outcome == Outcome(code=0)


def test_a_host_that_comes_when_some_have_succeeded_is_too_late() -> None:
    state = state_of("ab", max_hosts=3)
    apply(state, Ended("a", 0, well=True), joined("c"))
    assert state.phase is Phase.RUNNING


def test_a_broken_connection_stops_the_round_and_the_next_waits_until_it_is_clear() -> None:
    state = state_of("ab", min_hosts=1, max_restarts=3)
    apply(state, Missing("b", 7), Missing("?", 0))
    assert state.phase is Phase.RUNNING
    apply(state, Missing("b", 0), Ended("a", 0))
    assert state.phase is Phase.STOPPING  # b may have ranks that run
    assert isinstance(state.action("b"), Stop)
    state.apply(Ended("b", 0))  # it is back
    assert plan_of(state).number == 1


def test_the_first_that_says_where_rank_0_is_counts() -> None:
    state = state_of("ab")
    before = state.action("b")
    assert isinstance(before, Work)
    state.apply(Ready("b", 0, "10.0.0.2", 2))
    assert state.action("b") == before


# --- hosts that have no part ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("came", "why"),
    [
        (Joined("c", "host-c", 1), "the job runs on 2 hosts; this host waits as a spare"),
        (Joined("c", "host-a", 1), "another launcher of this host takes part in the job; "),
        (Joined("c", "host-c", 1, 1), "node rank 1 is taken by host-b; "),
    ],
)
def test_a_spare_or_duplicate_host_learns_why_it_waits(came: Joined, why: str) -> None:
    state = JobState(Settings(min_hosts=2, max_hosts=2))
    apply(state, joined("a", 1, 0), joined("b", 1, 1))
    ready(state)
    state.apply(came)
    action = state.action("c")
    assert isinstance(action, Wait)
    assert action.spare.startswith(why)
    for member in "ab":
        assert isinstance(state.action(member), Work)


def test_a_host_that_is_let_in_is_not_told_that_it_is_a_spare() -> None:
    state = state_of("ab", min_hosts=1, max_hosts=3)
    state.apply(joined("c"))
    assert (state.phase, state.action("c")) == (Phase.STOPPING, Wait())
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
    assert state.phase is Phase.STOPPING  # b's workers are still there
    state.apply(Lost("b") if lost else Ended("b", 0))
    assert (ready(state).members, state.agents, state.departing) == (("a",), ("a",), False)
    state.apply(Failed("a", 0, 0, result(0)))  # of the round before
    assert (state.phase, state.restarts, state.failed) == (Phase.RUNNING, 0, False)


def test_who_coordinates_and_leaves_ends_the_job() -> None:
    state = state_of("ab", min_hosts=1, max_hosts=3)
    state.apply(Left("a", 143, "told to", ends_job=True))
    end(state)
    assert state.outcome == Outcome(code=143, why="told to")


def test_a_spare_that_leaves_a_fixed_number_dismisses_nobody() -> None:
    state = apply(state_of("ab"), joined("c"), Left("c", 143))
    assert (state.phase, state.departing) == (Phase.RUNNING, False)


def test_the_last_host_that_leaves_ends_the_job_also_while_it_waits() -> None:
    state = JobState(Settings(min_hosts=2, max_hosts=3))
    apply(state, joined("a"), joined("b"), Left("a", 143))
    assert (state.phase, state.agents) == (Phase.GATHERING, ("b",))
    state.apply(Left("b", 130, "told"))
    assert state.outcome == Outcome(code=130, why="told")


# --- waiting -------------------------------------------------------------------------------------


def test_timers_of_another_gathering_mean_nothing() -> None:
    state = state_of("ab", max_restarts=3)
    fail(state, "a")
    apply(state, Lost("b"), Ended("a", 0))
    assert state.action("a") == Wait(state._timer())
    assert (state._timer().name, state._timer().after_s) == ("join 1", 600.0)
    for name in ("join 0", "last call 0", "last call 1", "join 2"):
        state.apply(Expired(name))
        assert state.phase is Phase.GATHERING
    state.apply(Expired("join 1"))
    outcome = outcome_of(state)
    assert (outcome.code, outcome.failure, outcome.ranks) == (3, result(0), (result(0),))
    assert "1 of 2 (host-a)" in outcome.why
    assert "--nnodes" in outcome.why


def test_the_last_call_starts_the_first_round_and_takes_its_time() -> None:
    state = JobState(Settings(min_hosts=1, max_hosts=2, last_call_s=8.0))
    state.apply(joined("a"))
    timer = state._timer()
    assert (timer.name, timer.after_s, state.missing) == ("last call 0", 8.0, 0)
    apply(state, Expired("join 0"), Failed("a", 0, 0, result(0)))
    assert (state.plan, state.failed) == (None, False)
    for _ in range(2):  # another agent's clock is late
        state.apply(Expired(timer.name))
    assert (state.phase, plan_of(state).number) == (Phase.RUNNING, 0)


@pytest.mark.parametrize(
    ("came", "endpoint", "why"),
    [
        ([], "", ["too few hosts came to the endpoint", "(none)"]),
        ([joined("a")], "n:1", ["too few hosts came to n:1", "1 of 2 (host-a)", "--nnodes"]),
        ([joined("a", 1, 0), joined("b", 1, 0)], "n:1", ["node rank that was already in use"]),
    ],
)
def test_too_few_came(came: list[Joined], endpoint: str, why: list[str]) -> None:
    state = JobState(Settings(min_hosts=2, max_hosts=2, join_timeout_s=7, endpoint=endpoint))
    apply(state, *came)
    assert state._timer().after_s == 7
    state.apply(Expired("join 0"))
    assert outcome_of(state).code == 1
    assert [word for word in why if word not in outcome_of(state).why] == []


# --- what is told of it --------------------------------------------------------------------------


@pytest.mark.parametrize("raised", [False, True])
def test_hosts_that_do_not_reach_each_other_are_named(raised: bool) -> None:
    state = state_of("ab", endpoint="n:1")
    blames = fail(state, "a", code=1, peer=1).worker
    other = result(1, "host-b", code=1, peer=0)
    if not raised:  # it was ended before it had noticed
        other = replace(other, crash=None, ended_by_launcher=True)
    apply(state, Ended("a", 0, (blames,)), Ended("b", 0, (other,)))
    assert outcome_of(state).code == 1
    why = outcome_of(state).why
    assert "do not reach each other, though both reach n:1" in why
    assert "host-a and host-b" in why or "host-b and host-a" in why


def test_the_state_stays_small_though_many_ranks_say_much() -> None:
    state = state_of("ab", nproc=500)
    crash = Crash(type="E", message="m" * 8000, traceback="t" * 8000, peer=None)
    ranks = tuple(replace(result(rank), crash=crash) for rank in range(1000))
    state.apply(Failed("a", 0, 0, ranks[0]))
    apply(state, Ended("a", 0, ranks[:500]), Ended("b", 0, ranks[500:]))
    failure = outcome_of(state).failure
    assert failure is not None
    assert failure.crash == crash
    assert len(outcome_of(state).ranks) == 1000
    assert len(msgspec.msgpack.encode(state)) < 1 << 19


# --------------------------------------------------------------------------------------------------
# The state that decides on rounds, in thousands of random histories.
#
# The histories are made of what can happen to real agents: they join, leave, are lost, their
# workers fail or succeed, and they do what their action says, in any order and late. After each
# event the rules that must always hold are checked.


def copy(state: JobState) -> JobState:
    """Return what another agent reads of what one has written."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=type(state))


class World:
    """Agents that obey one state, and a generator that draws what happens to them next."""

    def __init__(self, state: JobState, draw: random.Random) -> None:
        self.state, self.draw = state, draw
        self.elastic = isinstance(state, ElasticState)
        self.log: list[Event] = []
        self.born = 0
        self.here: list[str] = []
        self.running: dict[str, int] = {}  # agent to the round whose workers it has

    def tell(self, event: Event) -> None:
        before, outline = copy(self.state), self.state.outline
        actions = {agent: self.state.action(agent) for agent in self.here}
        self.log.append(event)
        self.state.apply(event)
        again = copy(self.state)
        again.apply(event)  # of one who does not know that it has arrived
        assert again == self.state
        if self.state.outline == outline and not isinstance(event, Expired | Refused):
            others = [agent for agent in self.here if agent != event.agent]
            assert all(self.state.action(other) == actions.get(other) for other in others)
        self.check(before)

    def check(self, before: JobState) -> None:
        state, wanted, plan = self.state, self.state.settings, self.state.plan
        assert before.restarts <= state.restarts <= wanted.max_restarts
        assert (state.phase is Phase.OVER) == (state.outcome is not None)
        if before.phase is Phase.OVER:
            assert state == before
        if plan is None:
            return
        assert len(set(plan.members)) == len(plan.members)
        ranks = [plan.owner(rank) for rank in range(sum(each.nproc for each in plan.joined))]
        assert [ranks.count(each) for each in plan.joined] == [e.nproc for e in plan.joined]
        if plan == before.plan or self.elastic:
            return
        assert not self.running, "two rounds run at once"
        assert plan.number == (0 if before.plan is None else before.plan.number + 1)
        assert wanted.min_hosts <= len(plan.members) <= wanted.max_hosts

    def obey(self, agent: str) -> None:
        """Let an agent do its action."""
        action = self.state.action(agent)
        match action:
            case Work():
                others = {number for a, number in self.running.items() if a != agent}
                assert others <= {action.part.number}, "two rounds run at once"
                self.running[agent] = action.part.number
            case Prepare():
                self.tell(Ready(agent, action.round, "10.0.0.1", 29500))
            case Stop():
                self.running.pop(agent, None)
                self.tell(Ended(agent, action.round))
            case Leave() | Rejoin():
                self.running.pop(agent, None)
                self.here.remove(agent)
                if isinstance(action, Leave):
                    self.tell(Left(agent, action.outcome.code))
            case Wait():
                if action.timer is not None and self.draw.random() < 0.3:
                    self.tell(Expired(action.timer.name))

    def join(self) -> None:
        agent, self.born = f"{self.born}", self.born + 1
        node_rank = self.draw.choice([None, None, self.draw.randrange(4)])
        self.here.append(agent)
        host = f"h{self.draw.randrange(5)}"
        self.tell(Joined(agent, host, self.draw.randrange(1, 4), node_rank))

    def work(self, agent: str) -> None:
        """Let something become of an agent's workers."""
        plan, number = self.state.plan, self.running.get(agent)
        if plan is None or number is None or agent not in plan.members:
            return
        node = plan.members.index(agent)
        nprocs = [each.nproc for each in plan.joined]
        local = self.draw.randrange(nprocs[node])
        if self.draw.random() < 0.5:
            peer = self.draw.choice([None, self.draw.randrange(sum(nprocs))])
            action = self.state.action(agent)
            due = action.replaced if isinstance(action, Work) else ()
            times = next((each.times for each in due if each.local_rank == local), 0)
            worker = result(sum(nprocs[:node]) + local, f"host-{agent}", peer=peer)
            self.tell(Failed(agent, number, local, worker, times))
        elif self.elastic:
            self.tell(Finished(agent, number, local))
        else:
            del self.running[agent]
            self.tell(Ended(agent, number, well=True))

    def strike(self) -> None:
        agent = self.draw.choice(self.here)
        leaves = self.draw.random() < 0.5
        if leaves:
            self.tell(Left(agent, 143))
        if not leaves or agent not in self.state.agents:
            self.here.remove(agent)
            self.running.pop(agent, None)
        if not leaves:
            self.tell(Lost(agent))

    def step(self) -> None:
        kind = self.draw.random()
        if not self.here or kind < 0.15:
            self.join()
        elif kind < 0.25:
            self.strike()
        elif kind < 0.45:
            self.work(self.draw.choice(self.here))
        elif kind < 0.5 and self.log:
            late = self.draw.choice(self.log)  # and twice
            if not isinstance(late, Joined) or late.agent in self.state.agents:
                self.tell(late)
        elif kind < 0.52 and self.state.plan is not None:
            self.tell(Missing(self.draw.choice(self.here), self.state.plan.number))
        else:
            self.obey(self.draw.choice(self.here))

    def finish(self) -> None:
        """Let nothing more happen but what must: everybody does his action, all clocks run out."""
        for _ in range(200):
            if self.state.phase is Phase.OVER or not self.state.agents:
                return
            for agent in list(self.here):
                action = self.state.action(agent)
                self.obey(agent)
                if isinstance(action, Wait) and action.timer is not None:
                    self.tell(Expired(action.timer.name))
                number, plan = self.running.get(agent), self.state.plan
                if number is not None and plan is not None and self.elastic:
                    for local in range(plan.joined[plan.members.index(agent)].nproc):
                        self.tell(Finished(agent, number, local))
                elif number is not None:
                    del self.running[agent]
                    self.tell(Ended(agent, number, well=True))
        raise AssertionError("the history has no end")


@pytest.mark.parametrize("kind", [JobState, ElasticState])
@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 60))
def test_random_histories_keep_the_rules_and_end(
    kind: type[JobState], seed: int, steps: int
) -> None:
    draw = random.Random(seed)
    least = draw.randrange(1, 4)
    wanted = Settings(
        min_hosts=least,
        max_hosts=least + draw.choice([0, 0, 1, 3]),
        max_restarts=draw.randrange(5),
        min_ranks=draw.randrange(1, 4),
    )
    world = World(kind(wanted), draw)
    for _ in range(steps):
        world.step()
    world.finish()
