"""Jobs' states for tests, and what happens to them."""

from dataclasses import replace

from dure.launch.agent.elastic import ElasticState
from dure.launch.agent.events import (
    Ended,
    Event,
    Expired,
    Failed,
    Idle,
    JobOutcome,
    Joined,
    RoundPlan,
    RunRound,
    Settings,
    Stop,
)
from dure.launch.agent.state import JobState
from dure.launch.spec import Crash, Exit, RankResult


def result(
    rank: int, host: str = "host-a", *, code: int = 3, pid: int = 7, peer: int | None = None
) -> RankResult:
    """Return what is told of a rank that has failed, and perhaps blames a peer."""
    crash = Crash(type="PeerLost", message="gone", traceback="", exit_code=code, peer=peer)
    exit = Exit(code=code)
    return RankResult(
        rank=rank, host=host, pid=pid, exit=exit, crash=None if peer is None else crash
    )


def joined(agent: str, nproc: int = 1, node_rank: int | None = None) -> Joined:
    """Return the coming of an agent; a host is named after it."""
    return Joined(agent, f"host-{agent}", nproc, node_rank)


def state_of(
    agents: str, *, nproc: int = 1, elastic: bool = False, **wanted: int | str
) -> JobState:
    """Return a state whose round runs on as many hosts as there may be, unless `wanted` differs."""
    count = len(agents)
    settings = Settings(min_hosts=1 if elastic else count, max_hosts=count)
    state = (ElasticState if elastic else JobState)(replace(settings, **wanted))
    apply(state, *(joined(agent, nproc) for agent in agents))
    action = state.action(agents[0])
    if isinstance(action, Idle) and action.timer:
        state.apply(Expired(action.timer))
    ready(state)
    return state


def apply(state: JobState, *events: Event) -> JobState:
    """Let things happen, one after the other."""
    for event in events:
        state.apply(event)
    return state


def plan_of(state: JobState) -> RoundPlan:
    """Return the latest round."""
    assert state.plan is not None
    return state.plan


def ready(state: JobState) -> RoundPlan:
    """Return the round that has begun."""
    plan = plan_of(state)
    assert isinstance(state.action(plan.members[0]), RunRound)
    return plan


def fail(
    state: JobState, agent: str, local: int = 0, *, times: int = 0, early: bool = False, **how: int
) -> Failed:
    """Let a worker of the present round fail; return what its agent tells."""
    plan = plan_of(state)
    rank = sum(each.nproc for each in plan.joined[: plan.members.index(agent)]) + local
    event = Failed(agent, plan.number, local, result(rank, f"host-{agent}", **how), times, early)
    state.apply(event)
    return event


def end(state: JobState) -> None:
    """Let all members do what they must when a round is stopped."""
    plan = plan_of(state)
    for agent in plan.members:
        if isinstance(state.action(agent), Stop):
            state.apply(Ended(agent, plan.number))


def outcome_of(state: JobState) -> JobOutcome:
    """Return how a job has ended."""
    assert state.outcome is not None
    return state.outcome
